"""Data sets: tensors with a name, the options that made them, and a fingerprint."""
