"""Classes by name, and objects of them by text."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from .plugins import Plugins
from .spelling import Kind, Spelling, SpellingError, read

T = TypeVar("T")
Class = TypeVar("Class", bound=type)


class Registry(Generic[T]):
    """The classes of one kind.

    Those of other packages are found by entry points, of the group `hf_paged_eviction.` and the kind's plural, such as
    `hf_paged_eviction.policies`. They are loaded when a name is unknown, or when all names are asked for.

    Attributes:
        kind: what they are, for messages.
        base: what each is a subclass of.
        modifier: what those that are made around others of the kind are a subclass of; None where there are none.
        of_files: by name, those that a file makes: written `name:file`, made of the file and parameters.
        classes: by name, as far as they are loaded.
    """

    def __init__(
        self,
        kind: Kind,
        base: type[T],
        modifier: type[T] | None = None,
        of_files: Mapping[str, type[T]] = MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self.base = base
        self.modifier = modifier
        self.of_files = of_files
        self.classes: dict[str, type[T]] = {}
        self._plugins = Plugins(f"hf_paged_eviction.{kind.plural}")

    def register(self, name: str) -> Callable[[Class], Class]:
        """Class decorator: make a class available by name. The same class again replaces it.

        Raises:
            TypeError: the class is not of this kind.
            ValueError: the name belongs to another class.
        """

        def decorate(cls: Class) -> Class:
            found: Any = cls
            if not (isinstance(found, type) and issubclass(found, self.base)):
                base = self.base.__name__
                raise TypeError(f"@register_{self.kind.name}({name!r}) needs a subclass of {base}, got {cls!r}.")
            taken = self.classes.get(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (found.__module__, found.__qualname__):
                owner = f"{taken.__module__}.{taken.__qualname__}"
                raise ValueError(f"The {self.kind.name} name {name!r} is taken by {owner}.")
            found.name = name  # type: ignore[attr-defined]
            self.classes[name] = found
            return cls

        return decorate

    def load_plugins(self) -> None:
        """Load what other packages bring, once. One that is broken is warned of and left out."""
        self._plugins.load(lambda name, cls: self.register(name)(cls))

    def find(self, name: str) -> type[T] | None:
        """The class of that name."""
        if name not in self.classes:
            self.load_plugins()
        return self.classes.get(name)

    def names(self, modifiers: bool = False) -> tuple[str, ...]:
        """All names, sorted: of the modifiers, or of the others."""
        self.load_plugins()
        return tuple(sorted(name for name, cls in self.classes.items() if self.is_modifier(cls) is modifiers))

    def is_modifier(self, cls: type[T]) -> bool:
        """Whether objects of this class are made around others."""
        return self.modifier is not None and issubclass(cls, self.modifier)

    def make(self, thing: str | T) -> T:
        """The object that a text says; an object is returned as it is.

        Raises:
            ValueError: nothing has that name or parameter, a value is out of range, or the text cannot be read.
            TypeError: neither a text nor such an object.
        """
        if isinstance(thing, self.base):
            return thing
        if not isinstance(thing, str):
            name, base = self.kind.name, self.base.__name__
            article = "an" if base[0] in "AEIOU" else "a"
            raise TypeError(f"{name} must be a name or {article} {base} object (not a class), got {thing!r}.")
        text = thing.strip()
        if text in self.classes:
            return self._build(Spelling(text, (), {}, 0), text)
        if "(" not in text and not text.startswith(tuple(f"{name}:" for name in self.of_files)):
            if self.find(text) is None:
                raise self._unknown(text)
            return self._build(Spelling(text, (), {}, 0), text)
        return self._build(self.read(text), text)

    def read(self, text: str) -> Spelling:
        """What a text says, before anything is looked up.

        Raises:
            SpellingError: it cannot be read.
        """
        return read(self.kind, text, self.of_files)

    def _build(self, spelling: Spelling, text: str) -> T:
        cls = self.of_files.get(spelling.name) if spelling.file is not None else self.find(spelling.name)
        if cls is None:
            raise self._unknown(spelling.name)
        self._check_hosts(cls, spelling, text)
        signature = inspect.signature(cls)
        known = [name for name, parameter in signature.parameters.items() if parameter.default is not parameter.empty]
        for name in spelling.parameters:
            if name not in known:
                has = f"Its parameters: {', '.join(known)}" if known else "It has no parameters"
                raise self._error(text, spelling, f"{spelling.name} has no parameter {name}. {has}")
        hosts = [self._build(host, text) for host in spelling.hosts]
        files = () if spelling.file is None else (spelling.file,)
        try:
            bound = signature.bind(*files, *hosts, **spelling.parameters)
        except TypeError as error:
            example = f", as in {self._example(cls)!r}" if self.is_modifier(cls) else ""
            raise self._error(text, spelling, f"{spelling.name}: {error}{example}") from None
        return cls(*bound.args, **bound.kwargs)

    def _check_hosts(self, cls: type[T], spelling: Spelling, text: str) -> None:
        name, plural = spelling.name, self.kind.plural
        if self.is_modifier(cls) and not spelling.hosts:
            raise ValueError(
                f"{name!r} changes the scores of other {plural} and is none alone. Write it around one, as in "
                f"{self._example(cls)!r}."
            )
        if spelling.hosts and not self.is_modifier(cls):
            reason = f"{name} takes no other {self.kind.name}"
            if self.modifier is not None:
                reason = f"{reason}. Those that do are {', '.join(self.names(modifiers=True))}"
            raise self._error(text, spelling.hosts[0], reason)

    def _example(self, cls: type[T]) -> str:
        return str(getattr(cls, "example", self.kind.nested))

    def _error(self, text: str, spelling: Spelling, reason: str) -> SpellingError:
        return SpellingError.at(self.kind, text, spelling.column, reason)

    def _unknown(self, name: str) -> ValueError:
        known = self.names()
        close = get_close_matches(name, [*known, *self.names(modifiers=True)], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        message = f"Unknown {self.kind.name} {name!r}.{hint} Available: {', '.join(known)}."
        if self.modifier is not None:
            message = f"{message} Modifiers of these: {', '.join(self.names(modifiers=True))}."
        return ValueError(message)
