"""Sphinx configuration: `make docs`."""

import importlib.metadata

project = "ecorec_torchrec"
author = "the ecorec_torchrec authors"
release = importlib.metadata.version("ecorec-torchrec")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
myst_heading_anchors = 3
