"""The page: scrub through training and see all views move together."""
