"""How to install the libraries of an optional feature."""

DISTRIBUTION = "lam-retrieval"  # the project `lam` on PyPI is another one


def install_command(extra: str) -> str:
    """The shell command that adds an extra to an installed lam, in any folder.

    pip finds lam itself installed, from a clone too, and fetches the libraries of the extra alone.

    Args:
        extra: one of `setup.cfg`, such as "serve".

    Example:
        >>> print(install_command("serve"))
        pip install 'lam-retrieval[serve]'
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
