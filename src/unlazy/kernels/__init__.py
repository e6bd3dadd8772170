"""Kernels of networks: overlap (common active paths) and tangent (gradients), and how to compare them."""
