"""Options as fields: the command line, its help, run files and the settings of a run are read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

O = TypeVar("O", bound="Options")  # noqa: E741


class Options(BaseModel):
    """Some options, with their defaults; `model_fields_set` names those that were given.

    Class attributes:
        title: heading in `--help` of the options that the class brings; not inherited.
        first: options that most people need, which `--help` shows first; by default the model and those of the class.
        left_out: inherited ones that the command does not have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str]
    first: ClassVar[tuple[str, ...]] = ()
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
    def groups(cls) -> dict[str, dict[str, FieldInfo]]:
        """What the command line offers, by headings of `--help`: first what most people need."""
        own = [name for name in cls.model_fields if name == "model" or cls.owner(name) is cls]
        groups = {"options": {name: cls.model_fields[name] for name in cls.first or own}}
        for owner in [base for base in cls.__mro__ if issubclass(base, Options)]:
            for name in owner.model_fields:
                if cls.owner(name) is owner and name not in {*groups["options"], *cls.left_out}:
                    groups.setdefault(vars(owner).get("title", "more options"), {})[name] = cls.model_fields[name]
        return groups

    @classmethod
    def offered(cls) -> list[str]:
        """The names of what the command line offers."""
        return [name for group in cls.groups().values() for name in group]

    @classmethod
    def owner(cls, name: str) -> type[Options]:
        """The class that brings an option, whatever others make of it."""
        return [base for base in cls.__mro__ if issubclass(base, Options) and name in base.model_fields][-1]


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    metavar: str | None = None,
    shown: str | None = None,
    off: str | None = None,
    nargs: str = "+",
) -> Any:
    """A field of `Options`.

    Args:
        default: ... for what has to be given; a list of these is typed without a name.
        help: one sentence for `--help`.
        metavar: stands for the value in `--help`.
        shown: stands there for the default.
        off: switches off what is on by default.
        nargs: how many values a list takes: "+", or "*" for perhaps none.
    """
    extra: Any = {"min": at_least, "metavar": metavar, "shown": shown, "off": off, "nargs": nargs}
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


def nearest(name: str, names: Iterable[str]) -> str:
    """Behind an unknown name: what may have been meant, or what there is."""
    names = sorted(names)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"


def plain_type(field: FieldInfo) -> Any:
    """The type of an option without None; str for what is parsed from a text."""
    if any(isinstance(part, BeforeValidator) for part in field.metadata):
        return str
    kind = _bare(field.annotation)
    if get_origin(kind) is list:
        return list
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
    wanted, extra = plain_type(field), field.json_schema_extra
    if get_origin(wanted) is Literal:
        return f"write {' or '.join(get_args(wanted))}"
    least = extra["min"] if isinstance(extra, dict) else None
    known = {
        list: "a list of file names, such as [book.txt]",
        int: "a whole number" + ("" if least is None else f" from {least} up"),
        bool: "true or false",
        float: "a number",
    }
    return f"write {known.get(wanted, 'a text, in quotes if it looks like something else')}"


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
