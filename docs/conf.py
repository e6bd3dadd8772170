"""Sphinx settings: Markdown pages, API from docstrings, no network."""

project = "unlazy"
author = "The unlazy maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build", "circle_pilot.md", "kernel_speed.md"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.xref_missing"]
