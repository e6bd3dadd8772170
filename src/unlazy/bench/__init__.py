"""Benchmarks anyone can run: ours beside the peers, in one run, with ratios."""
