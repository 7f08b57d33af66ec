"""Classes by name, to which others may add their own."""

from typing import TypeVar

T = TypeVar("T")


def enter(table: dict[str, T], kind: str, name: str, entry: T) -> None:
    """Enter a class under a name; the same one again is no mistake.

    Args:
        table: classes by name, changed in place.
        kind: what the classes are, in the error.
        name: of the entry.
        entry: the class, or function, itself.

    Raises:
        ValueError: for a name that another entry has.

    Example:
        >>> table = {"int": int}
        >>> enter(table, "number", "float", float)
        >>> list(table)
        ['int', 'float']
    """
    if table.setdefault(name, entry) is not entry:
        other = getattr(table[name], "__name__", table[name])
        raise ValueError(f"there is a {kind} {name!r} already: {other}; take another name")
