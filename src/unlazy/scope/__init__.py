"""Watching a network while it trains."""
