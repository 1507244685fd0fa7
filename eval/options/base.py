"""Options as fields: the command line, run files and the settings of a run are read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

O = TypeVar("O", bound="Options")  # noqa: E741


class Options(BaseModel):
    """Some options, with their defaults; `model_fields_set` names those that were given.

    Class attributes:
        left_out: inherited ones that the command does not have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    left_out: ClassVar[frozenset[str]] = frozenset()

    def but(self: O, **changes: Any) -> O:
        """The same with some changes, which are taken as they are."""
        return self.model_copy(update=changes)

    def common(self, kind: type[Options]) -> dict[str, Any]:
        """The values of the options that `kind` has too."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in kind.model_fields}

    def as_json(self) -> dict[str, Any]:
        """The values as they read back from a file."""
        return self.model_dump(mode="json")

    @classmethod
    def offered(cls) -> dict[str, FieldInfo]:
        """What the command line offers: own options first, then those of each base."""
        own = [name for name in cls.model_fields if cls.owner(name) is cls]
        names = dict.fromkeys(
            [*own, *(name for base in cls.__bases__ if issubclass(base, Options) for name in base.model_fields)]
        )
        return {name: cls.model_fields[name] for name in names if name not in cls.left_out}

    @classmethod
    def owner(cls, name: str) -> type[Options]:
        """The class that brings an option, whatever others make of it."""
        return [base for base in cls.__mro__ if issubclass(base, Options) and name in base.model_fields][-1]


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    flags: str | None = None,
    metavar: str | None = None,
    shown: str | None = None,
    argument: bool = False,
) -> Any:
    """A field of `Options`.

    Args:
        help: one sentence for `--help`.
        flags: names other than `--the-name`, such as "--name/--no-name" of an option that is on by default.
        metavar: stands for the value in `--help`.
        shown: stands there for the default.
        argument: it is given without a name.
    """
    shape = {"flags": flags, "metavar": metavar, "shown": shown, "argument": argument}
    extra: Any = {**shape, "min": at_least}
    return Field(default, description=help, ge=at_least, json_schema_extra=extra)


def words(typed: str) -> list[str]:
    """The parts of a comma-separated list, each once."""
    return list(dict.fromkeys(word.strip() for word in typed.split(",") if word.strip()))


def readable(read: Callable[[str], Any]) -> AfterValidator:
    """A text that `read` takes, which raises ValueError for others; it stays as it is."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


def flag(name: str) -> str:
    """The name of an option as it is typed."""
    return "--" + name.replace("_", "-")


def plain_type(field: FieldInfo) -> Any:
    """The type of an option without None; str for what is parsed from a text."""
    if any(isinstance(part, BeforeValidator) for part in field.metadata):
        return str
    kind = _bare(field.annotation)
    if get_origin(kind) is list:
        return list[_bare(get_args(kind)[0])]  # type: ignore[misc]
    return kind if get_origin(kind) is Literal or kind in (bool, int, float, Path) else str


def _bare(kind: Any) -> Any:
    """A type without its annotations, and without None."""
    if get_origin(kind) in (Annotated, Union, UnionType):
        inner = [inner_kind for inner_kind in get_args(kind) if inner_kind is not NoneType]
        return _bare(inner[0]) if get_origin(kind) is Annotated or len(inner) == 1 else kind
    return kind


def problem(kind: type[Options], error: ValidationError) -> tuple[str, Any, str]:
    """The first option whose value cannot be used, the value, and what to write instead."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    value = first["input"] if len(first["loc"]) == 1 else [first["input"]]
    if first["type"] == "value_error":
        return name, value, str(first["ctx"]["error"])
    return name, value, _expected(kind.model_fields[name])


def _expected(field: FieldInfo) -> str:
    wanted = plain_type(field)
    if get_origin(wanted) is Literal:
        return f"write {' or '.join(get_args(wanted))}"
    if get_origin(wanted) is list:
        return "write a list of file names, such as [book.txt]"
    if wanted is int:
        extra = field.json_schema_extra
        least = extra["min"] if isinstance(extra, dict) else None
        return "write a whole number" + ("" if least is None else f" from {least} up")
    words = {bool: "true or false", float: "a number"}
    return f"write {words.get(wanted, 'a text, in quotes if it looks like something else')}"


def _joined(value: Any, kinds: type | tuple[type, ...]) -> Any:
    if isinstance(value, list):
        if not value or not all(isinstance(entry, kinds) and not isinstance(entry, bool) for entry in value):
            raise ValueError("write a list of names or numbers that is not empty")
        return ",".join(map(str, value))
    return str(value) if isinstance(value, kinds) and not isinstance(value, bool) else value


#: A path, also as a text.
File = Annotated[Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)]
#: Written with commas on the command line, perhaps as a list in a file.
Words = Annotated[str, BeforeValidator(lambda value: _joined(value, str))]
#: The same, where a file may have numbers.
Numbers = Annotated[str, BeforeValidator(lambda value: _joined(value, (str, int)))]
