"""Classes by name, to which others may add their own."""

from typing import TypeVar

T = TypeVar("T")


def enter(table: dict[str, T], kind: str, name: str, entry: T) -> None:
    """Enter a class or function into a table; the same one again is no mistake, a name that another one has is.

    Raises:
        ValueError: saying which kind of entry has the name.

    Example:
        >>> table = {"int": int}
        >>> enter(table, "number", "float", float)
        >>> list(table)
        ['int', 'float']
    """
    if table.setdefault(name, entry) is not entry:
        other = getattr(table[name], "__name__", table[name])
        raise ValueError(f"there is a {kind} {name!r} already: {other}; take another name")
