"""Blocks of rows, for computations with an intermediate matrix too large for memory or cache."""

from collections.abc import Iterator


def row_blocks(n: int, width: int, *, elements: int, most: int | None = None) -> Iterator[slice]:
    """Consecutive slices that cover n rows; a single empty slice if n = 0.

    A slice has at least one row, at most `most` rows, and at most `elements` elements in a matrix of `width` columns.

    Example:
        >>> list(row_blocks(5, 10, elements=20))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, elements // max(1, width))
    size = size if most is None else min(size, most)
    return (slice(start, min(start + size, n)) for start in range(0, max(n, 1), size))
