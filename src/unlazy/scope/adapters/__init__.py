"""A scope inside other people's training loops. Each module imports its own framework, and only that."""
