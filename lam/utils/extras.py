"""How to install the libraries of an optional feature."""

DISTRIBUTION = "lam-retrieval"  # `lam` on PyPI is another project


def install_command(extra: str) -> str:
    """The shell command that adds an extra to an installed lam, in any folder.

    pip finds that lam is installed, also from a clone, and fetches only the libraries of the extra.

    Args:
        extra: an extra of `setup.cfg`, such as "serve".

    Example:
        >>> print(install_command("serve"))
        pip install 'lam-retrieval[serve]'
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
