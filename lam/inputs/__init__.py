"""Preprocessing of image files and texts to inputs of a network."""

from collections.abc import Mapping
from typing import Any

from lam.inputs.preprocessing import Preprocessing, TextPreprocessing

AnyPreprocessing = Preprocessing | TextPreprocessing
"""Preprocessing of image files or texts; saved with the network."""


def preprocessing_from_json(fields: Mapping[str, Any]) -> AnyPreprocessing:
    """A `Preprocessing` or `TextPreprocessing` from the fields that its `to_json` returned.

    Raises:
        ValueError: for an unknown field or value.

    Example:
        >>> preprocessing_from_json({"max_bytes": 64})
        TextPreprocessing(max_bytes=64)
    """
    return (TextPreprocessing if "max_bytes" in fields else Preprocessing).from_json(fields)


__all__ = ["AnyPreprocessing", "Preprocessing", "TextPreprocessing", "preprocessing_from_json"]
