"""How the documentation is built: Markdown by MyST, docstrings by autodoc. A warning is an error (`make docs`)."""

from __future__ import annotations

from importlib.metadata import version as installed

project = "kafka-event-source"
author = "The kafka-event-source authors"
copyright = author
release = version = installed(project)

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["copy.css"]
html_js_files = ["copy.js"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_mock_imports = []
nitpicky = False
