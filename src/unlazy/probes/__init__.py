"""Probes: plain functions ``(model, batch) -> dict of tensors`` that look and change nothing."""
