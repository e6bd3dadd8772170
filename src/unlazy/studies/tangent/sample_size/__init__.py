"""The sample-size study: fixed and adaptive tangent features beside the network itself (Figure 4 of arXiv v2; claim L10)."""
