"""Training: one loop, many members at once, resumable to the same bits."""
