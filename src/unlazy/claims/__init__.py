"""Claims of the papers: the catalogue, the rule that judges them, and the scorecard."""
