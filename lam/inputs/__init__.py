"""From an image file or a text to what a network takes."""

from collections.abc import Mapping
from typing import Any

from lam.inputs.preprocessing import Preprocessing
from lam.inputs.texts import TextPreprocessing

AnyPreprocessing = Preprocessing | TextPreprocessing
"""How an image file, or a text, becomes an input; saved beside the network."""


def preprocessing_from_json(fields: Mapping[str, Any]) -> AnyPreprocessing:
    """The preprocessing of images or of texts that `to_json` of one gave.

    Raises:
        ValueError: If a key is unknown or a value is not allowed.

    Example:
        >>> preprocessing_from_json({"max_bytes": 64})
        TextPreprocessing(max_bytes=64)
    """
    return (TextPreprocessing if "max_bytes" in fields else Preprocessing).from_json(fields)


__all__ = ["AnyPreprocessing", "Preprocessing", "TextPreprocessing", "preprocessing_from_json"]
