"""Non-stationary data: the halves of the circle target change places in mid-training (F6)."""
