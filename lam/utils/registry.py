"""Tables of classes and functions by name, which users may extend."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def enter(table: dict[str, T], kind: str, name: str, entry: T) -> None:
    """Enter a class or function into a table, unless another entry has the name; `kind` names it in the error.

    Example:
        >>> table = {"int": int}
        >>> enter(table, "number", "float", float)
        >>> list(table)
        ['int', 'float']
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the name of a {kind} must be a word, got {name!r}")
    if table.setdefault(name, entry) is not entry:
        other = getattr(table[name], "__name__", table[name])
        raise ValueError(f"there is a {kind} {name!r} already: {other}; take another name")


def find(table: Mapping[str, T], kind: str, name: str, path: str) -> T:
    """The entry with a name; a `ValueError` for another name says that the function at `path` registers it."""
    if name not in table:
        raise ValueError(
            f"{kind} must be one of {', '.join(table)}, got {name!r}: register it with {path}, for a command in a file "
            "that --plugin names"
        )
    return table[name]


def name_of(table: Mapping[str, Any], entry: type, path: str) -> str:
    """The name of a class in a table; a `ValueError` with the table's path if the class is missing."""
    name = next((name for name, known in table.items() if known is entry), None)
    if name is None:
        raise ValueError(f"{entry.__name__} has no name: give it one, such as {path}['mine'] = {entry.__name__}")
    return name


def check_class(kind: str, entry: Any, base: type, *, record: bool = False) -> None:
    """Require a class derived from `base`; with `record`, it must be a dataclass, because its fields are settings."""
    if not (isinstance(entry, type) and issubclass(entry, base)):
        name = f"{base.__module__.removesuffix('.base')}.{base.__name__}"
        raise ValueError(
            f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} must be a class derived from {name}, got {entry!r}"
        )
    has_own_fields = "__annotations__" in vars(entry) and "__dataclass_params__" not in vars(entry)
    if record and (has_own_fields or not is_dataclass(entry)):
        raise ValueError(f"{entry.__name__} must be a frozen dataclass: put @dataclass(frozen=True) above it")
