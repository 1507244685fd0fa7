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

extensions = ["myst_nb", "sphinx_copybutton", "mathml", "for_site"]
exclude_patterns = ["_build", "_ext", "_generate", "**/.ipynb_checkpoints"]

# Text.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the committed outputs are shown; the test run executes the notebooks

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
