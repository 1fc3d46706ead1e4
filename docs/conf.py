"""Sphinx configuration: `make docs`."""

from importlib.metadata import version

project = "ecorec_torchrec"
author = "the ecorec_torchrec authors"
release = version("ecorec-torchrec")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
myst_heading_anchors = 3
