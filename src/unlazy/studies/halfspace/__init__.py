"""The half-space paper (Yadav, Ramaswamy, Lakshminarayanan, arXiv 2404.04312)."""
