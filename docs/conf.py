"""Settings of the site (`make docs`): Sphinx reads the pages as they stand in the repository.

The source folder is the root of the repository, so links between docs/, bench/results/ and the files beside README.md
are the same on a forge, in an editor and here. A link to a file that is no page becomes a download.
"""

import sys
from pathlib import Path

import olla

sys.path.insert(0, str(Path(__file__).parent))  # for commands.py

project = "olla"
release = version = olla.__version__
author = copyright = "the authors of olla, under Apache 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "commands"]
root_doc = "docs/index"
include_patterns = ["docs/**", "bench/results/**", "bench/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["docs/templates"]
templates_path = ["templates"]

myst_heading_anchors = 4  # as a forge makes them; a link to one that is missing is an error, as every warning is
suppress_warnings = ["toc.not_readable"]  # named before it is written; a page in no table of contents stays an error
toc_object_entries_show_parents = "hide"

default_role = "code"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short: types and units stand in Args
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Complexity", "Source"]

html_theme = "furo"
html_title = "olla"
html_additional_pages = {"index": "to_start.html"}  # the site opens at its root
html_copy_source = False
smartquotes = False  # quotes in docstrings are code
