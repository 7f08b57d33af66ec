"""Shows the `Example:` of a docstring as code, which griffe does for `Examples:` alone."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Renames the section when a docstring is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
