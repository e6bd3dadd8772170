"""What features fixed before the data can do on pattern data, beside a network that learns them (Figure 1, Theorem 2)."""
