"""A zoo of planted features: who finds them, and from how many samples?"""
