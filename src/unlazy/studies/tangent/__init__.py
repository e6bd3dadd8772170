"""Studies of the adaptive tangent paper."""
