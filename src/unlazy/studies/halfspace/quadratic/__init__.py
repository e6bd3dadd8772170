"""Quadratic gates against linear ones at the same number of parameters (F4)."""
