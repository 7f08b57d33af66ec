"""Tables of classes by name, which users may extend."""

from typing import TypeVar

T = TypeVar("T")


def enter(table: dict[str, T], kind: str, name: str, entry: T) -> None:
    """Enter a class or function into a table; entering it twice does nothing.

    Args:
        table: entries by name.
        kind: what the entries are, for the error.
        name: name of the new entry.
        entry: the class or function.

    Raises:
        ValueError: If another entry has the name.

    Example:
        >>> table = {"int": int}
        >>> enter(table, "number", "float", float)
        >>> list(table)
        ['int', 'float']
    """
    if table.setdefault(name, entry) is not entry:
        other = getattr(table[name], "__name__", table[name])
        raise ValueError(f"there is a {kind} {name!r} already: {other}; take another name")
