"""Registries of classes, which make objects from text."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from .parsing import Kind, NameParseError, ParsedName, read

T = TypeVar("T")
Class = TypeVar("Class", bound=type)


class Registry(Generic[T]):
    """The classes of one kind.

    There are three sorts of text: a name with or without parameters (`snapkv(window=16)`), a modifier around others
    (`caote(h2o)`), and a name with a table (`heads:[[1.5, 0.5]]`).

    A class of this package is loaded when its name is first asked for. Classes of other packages are found by entry
    points in the group `hf_paged_eviction.` plus the kind's plural, such as `hf_paged_eviction.policies`:
    `name = "package.module:Class"` is a class, which gets that name, and `name = "package.module"` a module that
    registers its classes when it is imported. They are loaded when a name is unknown, or when all names are listed.

    Args:
        modules: where the classes of this package are, by name: modules, such as "keys.keydiff", beside that of `base`.

    Attributes:
        kind: words for messages.
        base: base class of all classes.
        modifier: base class of modifiers; None if there are none.
        classes: the loaded classes by name.
    """

    def __init__(
        self,
        kind: Kind,
        base: type[T],
        modifier: type[T] | None = None,
        modules: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self.base = base
        self.modifier = modifier
        self.classes: dict[str, type[T]] = {}
        self._modules = modules
        self._plugins: list[EntryPoint] | None = None  # that are not loaded yet; None = not looked for

    def register(self, name: str) -> Callable[[Class], Class]:
        """Class decorator: make a class available under a name.

        Registering the same class again, as a notebook cell that is run twice does, replaces it. Packages can use entry
        points instead, so that their classes are found without an import.

        Raises:
            TypeError: the class is not of this kind.
            ValueError: another class has that name.
        """

        def decorate(cls: Class) -> Class:
            checked: Any = cls
            if not (isinstance(checked, type) and issubclass(checked, self.base)):
                base = self.base.__name__
                raise TypeError(f"@register_{self.kind.name}({name!r}) needs a subclass of {base}, got {cls!r}.")
            taken = self._loaded(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (
                checked.__module__,
                checked.__qualname__,
            ):
                owner = f"{taken.__module__}.{taken.__qualname__}"
                raise ValueError(f"The {self.kind.name} name {name!r} is taken by {owner}.")
            checked.name = name  # type: ignore[attr-defined]
            self.classes[name] = checked
            return cls

        return decorate

    def load(self) -> None:
        """Load all classes, those of other packages too. A broken one of these is left out with a warning."""
        for name in self._modules:
            self._loaded(name)
        group = f"hf_paged_eviction.{self.kind.plural}"
        if self._plugins is None:
            self._plugins = sorted(entry_points(group=group), key=lambda entry: (_package(entry), entry.name))
        while self._plugins:  # a plugin may ask for names itself while it is loaded
            entry = self._plugins.pop(0)
            try:
                loaded = entry.load()
                if entry.attr:
                    self.register(entry.name)(loaded)
            except (Exception, SystemExit) as error:
                warnings.warn(
                    f"{entry.name!r} of the package {_package(entry)!r} (entry point {group}: {entry.value}) is left "
                    f"out: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _loaded(self, name: str) -> type[T] | None:
        if name not in self.classes and name in self._modules:
            import_module(f".{self._modules[name]}", self.base.__module__.rpartition(".")[0])
        return self.classes.get(name)

    def find(self, name: str) -> type[T] | None:
        """The class of that name."""
        if self._loaded(name) is None:
            self.load()
        return self.classes.get(name)

    def named(self, name: str) -> type[T]:
        """The class of that name.

        Raises:
            ValueError: there is none.
        """
        cls = self.find(name)
        if cls is None:
            raise self._unknown(name)
        return cls

    def names(self) -> tuple[str, ...]:
        """Available names, sorted, without modifiers."""
        return self._names(lambda cls: not self.is_modifier(cls))

    def modifiers(self) -> tuple[str, ...]:
        """Names of modifiers, such as `caote` in `caote(h2o)`, sorted."""
        return self._names(self.is_modifier)

    def _names(self, wanted: Callable[[type[T]], bool]) -> tuple[str, ...]:
        self.load()
        return tuple(sorted(name for name, cls in self.classes.items() if wanted(cls)))

    def is_modifier(self, cls: type[T]) -> bool:
        """Whether this class is a modifier."""
        return self.modifier is not None and issubclass(cls, self.modifier)

    def make(self, thing: str | T, profile: str | None = None) -> T:
        """Make an object from text. An object is returned unchanged.

        Args:
            thing: a name ("h2o"), a name with parameters ("snapkv(window=16, pooling=max)"), a modifier around other
                policies ("graphkv(hybrid(h2o, recency), sources=0.2)") or, for "heads", a name with a table
                ("heads:[[1.5, 0.5], [1.0, 1.0]]"). The `label` of an object is such a text.
            profile: the file for names that read a profile, such as "observed", alone or inside a modifier. Without it
                such an object says what it needs, and cannot score.

        Raises:
            ValueError: there is no such name or parameter, a value is out of range, the text cannot be parsed, or there
                is no such profile.
            TypeError: `thing` is neither text nor such an object.
        """
        if isinstance(thing, self.base):
            return thing
        if not isinstance(thing, str):
            name, base = self.kind.name, self.base.__name__
            article = "an" if base[0] in "AEIOU" else "a"
            raise TypeError(f"{name} must be a name or {article} {base} object (not a class), got {thing!r}.")
        text = thing.strip()
        plain = "(" not in text and ":" not in text
        return self._build(ParsedName(text, (), {}, 0) if plain else read(self.kind, text), text, profile)

    def reads_profile(self, thing: object) -> bool:
        """Whether an object, or one that is made from this text, reads a profile; False if it cannot be parsed."""
        if not isinstance(thing, str):
            return bool(getattr(thing, "profile_digests", {}))
        try:
            names = [read(self.kind, thing)]
        except NameParseError:
            return False
        for parsed in names:
            names += parsed.hosts
        classes = (self.find(parsed.name) for parsed in names if parsed.table is None)
        return any(cls is not None and _reads_profile(cls) for cls in classes)

    def _build(self, parsed: ParsedName, text: str, profile: str | None) -> T:
        name, cls = parsed.name, self.named(parsed.name)
        self._check_hosts(cls, parsed, text)
        signature = inspect.signature(cls)
        parameters = signature.parameters.values()
        by_make = ("profile", "table") if _reads_profile(cls) else ()  # given beside the parentheses
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.VAR_POSITIONAL
            and parameter.name not in by_make
            and not (self.is_modifier(cls) and parameter.default is parameter.empty)
        ]
        for wanted in parsed.parameters:
            if wanted not in names:
                has = f"Its parameters: {', '.join(names)}" if names else "It has no parameters"
                raise self._error(text, parsed, f"{name} has no parameter {wanted}. {has}")
        if parsed.table is not None and "table" not in signature.parameters:
            raise self._error(text, parsed, f"{name} takes no table")
        hosts = [self._build(host, text, profile) for host in parsed.hosts]
        more: dict[str, Any] = {} if parsed.table is None else {"table": parsed.table}
        if _reads_profile(cls) and parsed.table is None:
            more["profile"] = profile
        try:
            bound = signature.bind(*hosts, **parsed.parameters, **more)
        except TypeError as error:
            example = f", as in {self._example(cls)!r}" if self.is_modifier(cls) else ""
            raise self._error(text, parsed, f"{name}: {error}{example}") from None
        return cls(*bound.args, **bound.kwargs)

    def _check_hosts(self, cls: type[T], parsed: ParsedName, text: str) -> None:
        name, plural = parsed.name, self.kind.plural
        if self.is_modifier(cls) and not parsed.hosts:
            raise ValueError(
                f"{name!r} changes the scores of other {plural} and does not work alone. Write it around one, as "
                f"in {self._example(cls)!r}."
            )
        if parsed.hosts and not self.is_modifier(cls):
            reason = f"{name} takes no other {self.kind.name}"
            if self.modifier is not None:
                reason = f"{reason}. Those that do are {', '.join(self.modifiers())}"
            raise self._error(text, parsed.hosts[0], reason)

    def _example(self, cls: type[T]) -> str:
        return str(getattr(cls, "example", self.kind.nested))

    def _error(self, text: str, parsed: ParsedName, reason: str) -> NameParseError:
        return NameParseError.at(self.kind, text, parsed.column, reason)

    def _unknown(self, name: str) -> ValueError:
        names = self.names()
        close = get_close_matches(name.lower(), [*names, *self.modifiers()], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        message = f"Unknown {self.kind.name} {name!r}.{hint}"
        if names:
            message = f"{message} Available: {', '.join(names)}."
        if self.modifier is not None:
            message = f"{message} Modifiers of these: {', '.join(self.modifiers())}."
        return ValueError(message)


def _package(entry: EntryPoint) -> str:
    return "?" if entry.dist is None else entry.dist.name


def _reads_profile(cls: type) -> bool:
    return bool(getattr(cls, "reads_profile", False))
