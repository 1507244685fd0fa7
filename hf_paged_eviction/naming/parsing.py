"""Parse names with parameters: `snapkv(window=16)`, `graphkv(hybrid(h2o, recency), sources=0.2)`,
`ada_kv(floor=0.5)`."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from keyword import iskeyword
from typing import Any

_LONGEST = 1000
#: A name with a table in JSON: `heads:[[1.5, 0.5]]`.
_TABLE = re.compile(r"(?<![\w.])([^\W\d]\w*)\s*:\s*(\[[\[\]\s\d.,eE+-]*\])")


@dataclass(frozen=True)
class Kind:
    """A kind of names, with the words for messages.

    Attributes:
        name: singular, such as "policy".
        plural: plural, such as "policies".
        example: a name with a parameter, such as "snapkv(window=16)"; a plain name if none has parameters.
        nested: a modifier around a name, such as "caote(h2o)"; "" if there are no modifiers.
    """

    name: str
    plural: str
    example: str
    nested: str = ""

    @property
    def allowed(self) -> str:
        """The allowed forms of a text, for messages."""
        if not self.parameter:
            return f"Allowed is a name, such as {self.example!r}."
        plain = f"a name with parameters such as {self.example!r}"
        around = f", and a modifier around {self.plural} such as {self.nested!r}"
        return f"Allowed are a name, {plain}{around}." if self.nested else f"Allowed are a name, and {plain}."

    @property
    def parameter(self) -> str:
        """The parameter of the example."""
        return self.example.partition("(")[2].rstrip(")")


class NameParseError(ValueError):
    """The text is not a valid name of its kind."""

    @classmethod
    def at(cls, kind: Kind, text: str, column: int, reason: str) -> "NameParseError":
        """Make the error with the place, the reason and the allowed forms."""
        shown = text if len(text) <= 120 else f"{text[:120]}..."
        return cls(f"Cannot read the {kind.name} {shown!r}, character {column + 1}: {reason}. {kind.allowed}")


@dataclass(frozen=True)
class ParsedName:
    """A parsed name.

    Attributes:
        name: the name itself.
        hosts: the names in its parentheses.
        parameters: the parameters by name.
        column: column in the text where it begins, from 0.
        table: the table of `name:table` as JSON; None for names without a table.
    """

    name: str
    hosts: tuple["ParsedName", ...]
    parameters: Mapping[str, Any]
    column: int
    table: str | None = None


def read(kind: Kind, text: str) -> ParsedName:
    """Parse a text. Nothing is evaluated.

    Raises:
        NameParseError: the text cannot be parsed.
    """
    text = text.strip()
    if len(text) > _LONGEST:
        raise NameParseError.at(kind, text, _LONGEST, f"it is longer than {_LONGEST} characters")
    try:
        plain, tables = _take_out_tables(text)
        return _Reader(kind, text, tables).thing(ast.parse(plain, mode="eval").body)
    except SyntaxError as error:
        file = re.search(r"\w:", text)
        column, reason = max((error.offset or 1) - 1, 0), error.msg
        if file:
            column, reason = file.end() - 1, "a profile is no part of a name: it has an option of its own, profile=FILE"
        raise NameParseError.at(kind, text, column, reason) from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, NameParseError):
            raise
        raise NameParseError.at(kind, text, 0, str(error) or "it is nested too deeply") from None


def _take_out_tables(text: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Replace each `name:table` by a plain word of the same length, so that columns do not change.

    Returns:
        The new text, and for each word its name and table.
    """
    tables: dict[str, tuple[str, str]] = {}

    def replace(match: re.Match[str]) -> str:
        word = f"_{match.start()}".ljust(len(match[0]), "_")
        tables[word] = match[1], match[2]
        return word

    return _TABLE.sub(replace, text), tables


class _Reader:
    def __init__(self, kind: Kind, text: str, tables: Mapping[str, tuple[str, str]]) -> None:
        self.kind = kind
        self.text = text
        self.tables = tables

    def thing(self, node: ast.expr) -> ParsedName:
        if isinstance(node, ast.Name):
            name, table = self.tables.get(node.id, (node.id, None))
            return ParsedName(name, (), {}, self._column(node), table)
        if not isinstance(node, ast.Call):
            such = f", such as {self.kind.parameter}" if self.kind.parameter else ""
            by_name = f"parameters are given by name{such}"
            raise self._error(node, f"this is no {self.kind.name} ({by_name})")
        if not isinstance(node.func, ast.Name):
            raise self._error(node.func, "a name must stand before the parentheses")
        hosts = tuple(self.thing(argument) for argument in node.args)
        parameters: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in parameters:
                reason = "** is not allowed" if keyword.arg is None else f"{keyword.arg} is given twice"
                raise self._error(keyword.value, reason)
            parameters[keyword.arg] = self._value(keyword.value)
        name, table = self.tables.get(node.func.id, (node.func.id, None))
        return ParsedName(name, hosts, parameters, self._column(node), table)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):  # pooling=max, without quotes that a shell would eat
            return node.id
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            raise self._error(node, "a parameter must be a number, a word, True, False, None or a tuple") from None

    def _column(self, node: ast.expr) -> int:
        lines = self.text.splitlines(keepends=True)
        before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        return sum(map(len, lines[: node.lineno - 1])) + len(before)

    def _error(self, node: ast.expr, reason: str) -> NameParseError:
        return NameParseError.at(self.kind, self.text, self._column(node), reason)


def format_name(thing: Any, hosts: tuple[Any, ...] = ()) -> str:
    """Write an object as text.

    Args:
        thing: a dataclass with a `name`; for other objects the text is the name only. The profile that it reads is no
            part of the text.
        hosts: the policies inside a modifier; their fields are not written as parameters.
    """
    name = thing.name or type(thing).__name__
    inside = [host.label for host in hosts]
    for field in fields(thing) if is_dataclass(thing) else ():
        value = getattr(thing, field.name)
        is_host = value is hosts or any(value is host for host in hosts)
        is_profile = field.name == "profile" and getattr(thing, "reads_profile", False)
        if not is_host and not is_profile and field.init and value != field.default:
            inside.append(f"{field.name}={_word(value)}")
    return f"{name}({', '.join(inside)})" if inside else name


def _word(value: Any) -> str:
    bare = isinstance(value, str) and value.isascii() and value.isidentifier() and not iskeyword(value)
    return str(value) if bare else repr(value)
