"""Gated networks: one skeleton, independent choices of gating, experts, gate rule, biases and start."""
