"""How Sphinx makes the pages: `make docs`."""

from checkmate import __version__

project = "checkmate"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "exclude-members": "__init__"}
default_role = "py:obj"  # `solve` in a docstring is a link
html_theme = "alabaster"
html_theme_options = {"description": "Train PyTorch models inside a byte budget", "page_width": "64rem"}
