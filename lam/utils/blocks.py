"""Rows in blocks, for computations whose intermediate matrix would not fit into memory or cache at once."""

from collections.abc import Iterator


def row_blocks(n: int, width: int, *, elements: int, most: int | None = None) -> Iterator[slice]:
    """Slices of consecutive rows that cover N rows; one empty slice for no row.

    Args:
        n: number of rows N.
        width: columns of the matrix that each block makes.
        elements: greatest number of matrix elements of a block; a block has at least one row.
        most: greatest number of rows of a block.

    Example:
        >>> list(row_blocks(5, 10, elements=20))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, elements // max(1, width))
    size = size if most is None else min(size, most)
    return (slice(start, min(start + size, n)) for start in range(0, max(n, 1), size))
