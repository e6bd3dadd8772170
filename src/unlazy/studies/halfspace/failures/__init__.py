"""Failure cases that a published summary of the half-space paper names: high frequency, interactions, small data."""
