"""The emergence paper (Shi, Wei, Liang, ICLR 2022, arXiv 2206.01717)."""
