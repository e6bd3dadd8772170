"""Calibration of the scope's verdict: measures beside the gap to a separately trained linearised network."""
