"""Claims: their declaration, the rule that judges them, and the scorecard."""
