"""How to install the libraries of an optional feature."""

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "lam-retrieval"  # `lam` on PyPI is another project


def install_command(extra: str) -> str:
    """The shell command that adds an extra of `setup.cfg` to an installed lam, or to one from a clone."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import into an error that names the `purpose`, and says how to install the extra of `setup.cfg`.

    Example:
        >>> with needs_extra("nothing", "dragons"):
        ...     import dragons
        Traceback (most recent call last):
        ...
        ImportError: dragons: a package is missing (No module named 'dragons'): pip install 'lam-retrieval[nothing]'
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose}: a package is missing ({error}): {install_command(extra)}") from None
