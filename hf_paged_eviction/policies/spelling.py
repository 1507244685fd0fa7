"""Policies as text: `snapkv(window=16)`, `graphkv(hybrid(h2o, recency), sources=0.2)`."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from keyword import iskeyword
from typing import Any

_LONGEST = 1000
_ALLOWED = (
    "Allowed are a name, a name with parameters such as 'snapkv(window=16)', and a modifier around policies such as "
    "'caote(h2o)'."
)


class SpellingError(ValueError):
    """The text is no policy."""

    @classmethod
    def at(cls, text: str, column: int, reason: str) -> "SpellingError":
        """Say where, why, and what is allowed."""
        shown = text if len(text) <= 120 else f"{text[:120]}..."
        return cls(f"Cannot read the policy {shown!r}, character {column + 1}: {reason}. {_ALLOWED}")


@dataclass(frozen=True)
class Spelling:
    """A policy as written.

    Attributes:
        name: of the policy.
        hosts: the policies in its parentheses.
        parameters: the values by name.
        column: where it begins in the text, from 0.
    """

    name: str
    hosts: tuple["Spelling", ...]
    parameters: Mapping[str, Any]
    column: int


def read(text: str) -> Spelling:
    """Take a policy's text apart. Nothing is evaluated.

    Raises:
        SpellingError: the text is no policy.
    """
    text = text.strip()
    if len(text) > _LONGEST:
        raise SpellingError.at(text, _LONGEST, f"it is longer than {_LONGEST} characters")
    try:
        return _Reader(text).policy(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise SpellingError.at(text, max((error.offset or 1) - 1, 0), error.msg) from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, SpellingError):
            raise
        raise SpellingError.at(text, 0, str(error) or "it is nested too deeply") from None


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text

    def policy(self, node: ast.expr) -> Spelling:
        if isinstance(node, ast.Name):
            return Spelling(node.id, (), {}, self._column(node))
        if not isinstance(node, ast.Call):
            raise self._error(node, "this is no policy (parameters are given by name, such as window=16)")
        if not isinstance(node.func, ast.Name):
            raise self._error(node.func, "a name must stand before the parentheses")
        hosts = tuple(self.policy(argument) for argument in node.args)
        parameters: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in parameters:
                reason = "** is not allowed" if keyword.arg is None else f"{keyword.arg} is given twice"
                raise self._error(keyword.value, reason)
            parameters[keyword.arg] = self._value(keyword.value)
        return Spelling(node.func.id, hosts, parameters, self._column(node))

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

    def _error(self, node: ast.expr, reason: str) -> SpellingError:
        return SpellingError.at(self.text, self._column(node), reason)


def spell(policy: Any, hosts: tuple[Any, ...] = ()) -> str:
    """The text that `make_policy` makes this policy of.

    Args:
        policy: a dataclass; of any other object the name is all there is to tell.
        hosts: the policies inside a modifier; the fields that hold them are no parameters.
    """
    name = policy.name or type(policy).__name__
    inside = [host.label for host in hosts]
    for field in fields(policy) if is_dataclass(policy) else ():
        value = getattr(policy, field.name)
        is_host = value is hosts or any(value is host for host in hosts)
        if not is_host and field.init and value != field.default:
            inside.append(f"{field.name}={_word(value)}")
    return f"{name}({', '.join(inside)})" if inside else name


def _word(value: Any) -> str:
    bare = isinstance(value, str) and value.isascii() and value.isidentifier() and not iskeyword(value)
    return str(value) if bare else repr(value)
