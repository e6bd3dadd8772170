"""What is known exactly: path sums by enumeration, regions by their boundaries, examples, laws in closed form."""
