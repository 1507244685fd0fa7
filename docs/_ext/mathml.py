"""Formulas as MathML, which browsers draw by themselves: no script, no picture, nothing to fetch."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def _mathml(formula: str, as_block: bool) -> str:
    try:
        return str(latex2mathml.tex2mathml(formula, as_block=as_block))
    except Exception as error:
        raise ExtensionError(f"cannot read the formula {formula!r}: {error}") from error


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math-block">{_mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config["html_math_renderer"] = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
