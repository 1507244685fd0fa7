"""Small pieces of Markdown, for GitHub and for the site alike."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Class attributes|Returns|Yields|Raises|Warns):$")
_ITEM = re.compile(r"([\w.*`, ]+): (.*)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """A table whose columns from `numbers_from` on are aligned to the right."""
    rule = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join(_line(cells) for cells in (header, rule, *rows))


def titled(title: str, rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """Rows behind a column that the first of them has alone."""
    for at, row in enumerate(rows):
        yield ["" if at else title, *row]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def listed(names: Sequence[str]) -> str:
    """Join one or more names: "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def paper_link(paper: str | None, prefix: str = "arXiv ") -> str:
    """An arXiv id as a link; "none" where there is none."""
    return f"[{prefix}{paper}](https://arxiv.org/abs/{paper})" if paper else "none"


def docstring(thing: Any, without: Sequence[str] = ()) -> str:
    """The docstring of a class or function as Markdown: formulas, lists of arguments, examples.

    Args:
        without: names of sections that are left out.
    """
    lines = (inspect.getdoc(thing) or "").splitlines()
    return "\n\n".join(part for part in _parts(lines, without) if part)


def first_paragraph(thing: Any) -> str:
    """What a docstring begins with, in a line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _parts(lines: list[str], without: Sequence[str]) -> Iterator[str]:
    paragraph: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        special = line.startswith((".. math::", ">>>")) or _SECTION.match(line)
        if special or not line.strip():
            yield "\n".join(paragraph)
            paragraph = []
        if not special:
            paragraph += [line] if line.strip() else []
            at += 1
            continue
        if line.startswith(">>>"):
            end = next((n for n in range(at, len(lines)) if not lines[n].strip()), len(lines))
            yield _example(lines[at:end])
        else:
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() and lines[n][0] != " "), len(lines))
            block = textwrap.dedent("\n".join(lines[at + 1 : end])).strip()
            if line.startswith(".. math::"):
                formula = f"{line.removeprefix('.. math::').strip()}\n{block}".strip()
                yield f"$$\n{formula}\n$$"
            elif line.removesuffix(":") not in without:
                yield _section(line.removesuffix(":"), block)
        at = end
    yield "\n".join(paragraph)


def _example(lines: list[str]) -> str:
    code = (re.sub(r"\s+# doctest: .*", "", line) for line in lines)
    return "```pycon\n" + "\n".join(code) + "\n```"


def _section(name: str, block: str) -> str:
    """The arguments, or what else has a name and a text each, as a list."""
    items = re.split(r"\n(?=\S)", block)
    if name in ("Returns", "Yields") or not all(_ITEM.fullmatch(item) for item in items):
        return f"**{name}**: {' '.join(block.split())}"
    return f"**{name}**\n\n" + "\n".join(_entry(item) for item in items)


def _entry(item: str) -> str:
    names, text = _ITEM.fullmatch(item).groups()  # type: ignore[union-attr]
    written = ", ".join(f"`{name.strip(' `')}`" for name in names.split(","))
    return f"- {written}: {' '.join(text.split())}"


def signature(thing: Any, name: str) -> str:
    """How a class or function is called, as its source says it; private arguments are left out."""
    arguments = _arguments(thing)
    line = f"{name}({', '.join(arguments)})"
    if len(line) > 88:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"
    return f"```text\n{line}\n```"


def call(thing: Any, name: str) -> str:
    """How a class or function is called, without the types."""
    return f"{name}({', '.join(_arguments(thing, typed=False))})"


def _arguments(thing: Any, typed: bool = True) -> list[str]:
    thing = getattr(thing, "__func__", thing)  # of a bound method
    if inspect.isfunction(thing):
        return _parameters(inspect.unwrap(thing), typed)
    if "__init__" in vars(thing) and "__dataclass_fields__" not in vars(thing):
        return _parameters(inspect.unwrap(vars(thing)["__init__"]), typed)
    return _fields(thing, typed)


def _parameters(function: Any, typed: bool) -> list[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    texts, arguments = [], tree.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    texts += [_argument(argument, default, typed) for argument, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        texts.append(f"*{_argument(arguments.vararg, typed=typed)}")
    elif arguments.kwonlyargs:
        texts.append("*")
    texts += [
        _argument(argument, default, typed)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        texts.append(f"**{_argument(arguments.kwarg, typed=typed)}")
    return [text for text in texts if not re.match(r"(self|cls)\b|_\w", text)]


def _argument(argument: ast.arg, default: ast.expr | None = None, typed: bool = True) -> str:
    kind = f": {_annotation(argument.annotation)}" if typed and argument.annotation else ""
    value = f"{' = ' if kind else '='}{ast.unparse(default)}" if default is not None else ""
    return f"{argument.arg}{kind}{value}"


def _annotation(node: ast.expr) -> str:
    """As it is written, also where it is written as text."""
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _fields(cls: type, typed: bool) -> list[str]:
    """The fields of a dataclass, those of its bases first."""
    field_texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" not in vars(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind = _annotation(node.annotation)
                if not kind.startswith("ClassVar") and not node.target.id.startswith("_"):
                    value = _default(node.value) if node.value is not None else ""
                    text = f"{node.target.id}: {kind}{value}"
                    field_texts[node.target.id] = text if typed else node.target.id + value.replace(" = ", "=", 1)
    return list(field_texts.values())


def _default(value: ast.expr) -> str:
    """The default of a field; of `field(...)`, what it says."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        default = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        return f" = {ast.unparse(default)}" if default is not None else " = ..."
    return f" = {ast.unparse(value)}"
