"""The circle study: Figures 2, 3, 4, 5, 6, 9 and 10 of the half-space paper, claims C7 to C15, and controls."""
