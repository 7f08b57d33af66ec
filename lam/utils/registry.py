"""Tables of classes by name, to which users may add their own."""

from typing import TypeVar

T = TypeVar("T")


def enter(table: dict[str, T], kind: str, name: str, entry: T) -> None:
    """Enter a class or function into a table; entering it twice does nothing.

    Args:
        table: by name.
        kind: of the entries, for the error.
        name: of the entry.
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
