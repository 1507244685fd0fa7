"""Signatures as users need them."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_PRIVATE = re.compile(r",\s*_\w+(: [^,()]+)?( = [^,()]+)?")


def _without_private(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave out arguments that begin with an underscore."""
    return signature and _PRIVATE.sub("", signature), returns


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-signature", _without_private)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
