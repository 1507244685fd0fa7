"""How the documentation is built: `sphinx-build -W -n docs docs/_build/html`; needs the extra `docs`.

Nothing is fetched, neither while building nor while reading: formulas become MathML, scripts and styles are local.
`sphinx-build -b linkcheck docs docs/_build/linkcheck` checks the links that lead elsewhere, and needs the network.
"""

import sys
from pathlib import Path

import hf_paged_eviction

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "hf_paged_eviction"
version = release = hf_paged_eviction.__version__
author = "The contributors to hf_paged_eviction"
project_copyright = "the contributors; Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "generated",
    "notebooks",
    "signatures",
]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]

# Text.
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the committed outputs are shown; the test run executes the notebooks
default_role = "literal"  # docstrings write code in single backticks

# Docstrings.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Class attributes", "params_style")]

# Every reference inside is checked (-n); what other packages define has no target here.
# Neither have types of our inner modules, which only appear in signatures.
nitpick_ignore_regex = [
    ("py:class", r"hf_paged_eviction\.(?!policies\.|allocators\.|learned\.calibration\.[A-Z])[a-z_.]+\.[A-Z]\w*"),
    ("py:class", r"hf_paged_eviction\.learned\.calibration\.features\.[A-Z]\w+"),
    ("py:class", r"Tensor|Precision"),  # of arguments that are written as text, since their classes bring torch
    ("py:.*", r"(torch|transformers|collections|typing|pathlib|abc|types|rich|typer|dataclasses|contextlib)(\..*)?"),
]

# Look.
html_theme = "furo"
html_title = f"hf_paged_eviction {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
pygments_style = "tango"

linkcheck_anchors = False
linkcheck_timeout = 20
