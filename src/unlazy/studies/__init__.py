"""Studies: one experiment of a paper each, with its scales, figures and claims."""
