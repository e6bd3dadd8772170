"""Counting paths: the graph of a network's units, the numbers of open paths through it, and the paths themselves."""
