"""From a text to the tensor that a network takes: its UTF-8 bytes, so that texts go wherever images go.

How bytes become tokens is the network's own part (`lam.models.sentences`).
"""

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
    """A text as its UTF-8 bytes, cut between characters or padded with zeros to one length.

    Spaces at its ends are left out, and so are zero bytes; halves of characters become question marks.

    Args:
        max_bytes: the length L, at least 4.

    Raises:
        ValueError: If it is less.

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
        """(L,) of every result."""
        return (self.max_bytes,)

    def __call__(self, text: str) -> UInt8[Tensor, " L"]:
        """The tensor of one text.

        Raises:
            ValueError: If the text is empty.
        """
        content = self.kept(text).encode()
        if not content:
            raise ValueError("the text is empty: give at least one character that is no space")
        return torch.from_numpy(np.frombuffer(content.ljust(self.max_bytes, b"\0"), np.uint8).copy())

    def kept(self, text: str) -> str:
        """What of a text fits: the beginning of a long one."""
        return _content(text)[: self.max_bytes].decode(errors="ignore").rstrip()

    def is_cut(self, text: str) -> bool:
        """Whether only the beginning of a text fits."""
        return len(_content(text)) > self.max_bytes

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON has them, by which texts are told from images."""
        return {"max_bytes": self.max_bytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TextPreprocessing":
        """What `to_json` gave.

        Raises:
            ValueError: If a key is unknown or a value is not allowed.
        """
        if unknown := sorted(set(fields) - {"max_bytes"}):
            raise ValueError(f"the preprocessing of texts has no field {', '.join(unknown)}; allowed: max_bytes")
        return cls(**fields)


def _content(text: str) -> bytes:
    return text.replace("\0", "").strip().encode(errors="replace")


def texts_of(inputs: UInt8[Tensor, "N L"]) -> list[str]:
    """The texts that a batch of inputs holds."""
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in inputs.cpu().numpy()]
