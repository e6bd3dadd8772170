"""Sphinx settings: Markdown pages, tutorials executed at every build, API from docstrings, no network."""

import os
import sys
from pathlib import Path

project = "unlazy"
author = "The unlazy maintainers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "explanation/circle_pilot.md", "reference/kernel_speed.md"]  # the last two are included
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "unlazy"
html_show_sphinx = False

myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
)  # tutorials call `unlazy`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tutorials may run beside other work on two cores

autodoc_typehints = "description"
autodoc_member_order = "bysource"


def skip_request_methods(app, what, name, member, skip, options):
    """Leave out the methods that scikit-learn writes for its own routing of arguments; their text refers to its own pages."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def setup(app):
    app.connect("autodoc-skip-member", skip_request_methods)
