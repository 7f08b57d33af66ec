"""Classes by name, to which others may add their own."""

from typing import TypeVar

T = TypeVar("T")


def enter(table: dict[str, type[T]], kind: str, name: str, cls: type[T]) -> None:
    """Enter a class under a name; the same one again is no mistake.

    Args:
        table: classes by name, changed in place.
        kind: what the classes are, in the error.
        name: of the class.
        cls: the class.

    Raises:
        ValueError: for a name that another class has.

    Example:
        >>> table = {"int": int}
        >>> enter(table, "number", "float", float)
        >>> list(table)
        ['int', 'float']
    """
    if table.setdefault(name, cls) is not cls:
        raise ValueError(f"there is a {kind} {name!r} already: {table[name].__name__}; take another name")
