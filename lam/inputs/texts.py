"""`TextPreprocessing` turns a text into its UTF-8 bytes; `lam.models.sentences` turns bytes into tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

MAX_BYTES = 4096


@dataclass(frozen=True)
class TextPreprocessing:
    """Map a text to its UTF-8 bytes, cut between characters or padded with zeros to a fixed length.

    Zero bytes and surrounding spaces are removed; lone surrogates become question marks.

    Args:
        max_bytes: length L, at least 4.

    Example:
        >>> preprocessing = TextPreprocessing(max_bytes=8)
        >>> preprocessing("né ").tolist(), texts_of(preprocessing("né")[None])
        ([110, 195, 169, 0, 0, 0, 0, 0], ['né'])
    """

    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if type(self.max_bytes) is not int or self.max_bytes < 4:
            raise ValueError(f"max_bytes must be a number of bytes, at least 4, got {self.max_bytes!r}")

    @property
    def shape(self) -> tuple[int]:
        """(L,), the shape of every result."""
        return (self.max_bytes,)

    def __call__(self, text: str) -> UInt8[Tensor, " L"]:
        """The tensor of one text; a `ValueError` for an empty text."""
        content = self.kept(text).encode()
        if not content:
            raise ValueError("the text is empty: give at least one character other than a space")
        return torch.from_numpy(np.frombuffer(content.ljust(self.max_bytes, b"\0"), np.uint8).copy())

    def kept(self, text: str) -> str:
        """The text, or the beginning that fits."""
        return _content(text)[: self.max_bytes].decode(errors="ignore").rstrip()

    def is_cut(self, text: str) -> bool:
        """Whether only the beginning of a text fits."""
        return len(_content(text)) > self.max_bytes

    def to_json(self) -> dict[str, Any]:
        """The fields for JSON; `max_bytes` distinguishes them from the fields for images."""
        return {"max_bytes": self.max_bytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TextPreprocessing":
        """The preprocessing from the fields of `to_json`; a `ValueError` for an unknown field or value."""
        if unknown := sorted(set(fields) - {"max_bytes"}):
            raise ValueError(f"the preprocessing of texts has no field {', '.join(unknown)}; allowed: max_bytes")
        return cls(**fields)


def _content(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"a text must be a string, got {text!r}: leave out what is missing, and give str of the rest")
    return text.replace("\0", "").strip().encode(errors="replace")


def texts_of(inputs: UInt8[Tensor, "N L"]) -> list[str]:
    """The texts of a batch of inputs; a `TypeError` for other tensors, such as one text or features."""
    if inputs.ndim != 2 or inputs.dtype != torch.uint8:
        raise TypeError(
            f"texts must be a batch of bytes, uint8 (N, L), got {str(inputs.dtype)[6:]} {tuple(inputs.shape)}: give "
            "torch.stack([encoder.preprocessing(text) for text in texts])"
        )
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in inputs.cpu().numpy()]
