"""How to install the libraries of an optional feature."""

from collections.abc import Iterator
from contextlib import contextmanager

DISTRIBUTION = "lam-retrieval"  # `lam` on PyPI is another project


def install_command(extra: str) -> str:
    """The shell command that adds an extra to an installed lam, also if lam was installed from a clone.

    Args:
        extra: an extra of `setup.cfg`, such as "serve".

    Example:
        >>> print(install_command("serve"))
        pip install 'lam-retrieval[serve]'
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import into an error that says how to install the extra.

    Args:
        extra: an extra of `setup.cfg`.
        purpose: the feature that needs the packages, such as "vector stores of LangChain"; it begins the message.

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
