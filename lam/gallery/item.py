"""One item of the gallery, and the hash that tells whether it is still what was stored."""

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lam.gallery.enrolment import ID_RULE, MAX_DEPTH, MAX_LABEL, MAX_METADATA, id_of_digest, is_id
from lam.gallery.refusal import Refusal


@dataclass(frozen=True)
class Images:
    """The images that an item was made of.

    Attributes:
        count: how many there are.
        resultant: how far their directions agree; 1 for one image.
        least_kappa: the least of their κ; None for one image, or where it is not known.
        contents: ids by content, eight bytes each, of those of which it is known.
        sums: Σ κ, Σ √κ and the D numbers of Σ κμ in float64; None for one image, or where they are not known.
    """

    count: int = 1
    resultant: float = 1.0
    least_kappa: float | None = None
    contents: bytes = field(default=b"", repr=False)
    sums: bytes | None = field(default=None, repr=False)


_ONE = Images()


@dataclass(frozen=True)
class Item:
    """What is stored of an item.

    Attributes:
        id: stable, chosen by whoever adds it.
        vector: D float32 numbers, of length one, as bytes.
        kappa: its concentration.
        label: what it shows; empty where that is not known.
        metadata: whatever else is known, JSON.
        thumbnail: a small picture, or None.
        origin: `service`, or `index` for what `lam index` made.
        images: what it was made of.
    """

    id: str
    vector: bytes = field(repr=False)
    kappa: float
    label: str = ""
    metadata: str = "{}"
    thumbnail: bytes | None = field(default=None, repr=False)
    origin: str = "service"
    images: Images = _ONE

    @property
    def sha256(self) -> bytes:
        """The hash of all of it, each part with its length; one image of which nothing is known adds none."""
        digest, images = hashlib.sha256(), self.images
        parts = [
            self.id.encode(),
            self.vector,
            struct.pack("<d", self.kappa),
            self.label.encode(),
            self.metadata.encode(),
            b"" if self.thumbnail is None else b"\x01" + self.thumbnail,
            self.origin.encode(),
        ]
        if images != _ONE:
            parts += [
                struct.pack("<qd", images.count, images.resultant),
                b"" if images.least_kappa is None else struct.pack("<d", images.least_kappa),
                images.contents,
                b"" if images.sums is None else b"\x01" + images.sums,
            ]
        for part in parts:
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return digest.digest()

    @property
    def embedding(self) -> np.ndarray:
        """(D,) the vector as numbers."""
        return np.frombuffer(self.vector, np.float32)

    @property
    def least_kappa(self) -> float:
        """The least κ of the item and its images."""
        return self.kappa if self.images.least_kappa is None else min(self.kappa, self.images.least_kappa)


def content_id(content: bytes) -> str:
    """Give the id of what comes without one: the first 63 bits of its SHA-256, as `lam index` has it."""
    return str(id_of_digest(hashlib.sha256(content).hexdigest()))


def packed(contents: Iterable[int]) -> bytes:
    """Give ids by content as bytes."""
    return b"".join(content.to_bytes(8, "big") for content in contents)


def checked_id(identity: str) -> str:
    """Refuse what cannot be an id.

    Raises:
        Refusal: invalid.
    """
    if not is_id(identity):
        raise Refusal("invalid", "the id is not one that an item can have", allowed=ID_RULE)
    return identity


def checked_metadata(metadata: object) -> str:
    """Give metadata as the JSON text that is stored.

    Raises:
        Refusal: invalid, for what is no object, holds NaN or halves of characters, is too deep, or too long.
    """
    if not isinstance(metadata, dict):
        raise Refusal("invalid", "metadata must be a JSON object", allowed='an object such as {"name": "value"}')
    if _is_deeper(metadata, MAX_DEPTH):
        raise Refusal(
            "invalid", f"metadata is nested more than {MAX_DEPTH} deep", allowed=f"at most {MAX_DEPTH} levels"
        )
    try:
        json.dumps(metadata, ensure_ascii=False).encode()
        text = json.dumps(metadata, allow_nan=False, sort_keys=True)
    except UnicodeEncodeError:
        raise Refusal("invalid", "metadata must be valid Unicode", allowed="JSON") from None
    except ValueError:
        raise Refusal("invalid", "metadata must be finite numbers, text, lists and objects", allowed="JSON") from None
    if len(text) > MAX_METADATA:
        raise Refusal("invalid", f"metadata has {len(text)} characters", allowed=f"at most {MAX_METADATA}")
    return text


def _is_deeper(value: object, levels: int) -> bool:
    """Whether an object or list has more levels, itself being one."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _is_deeper(one, levels - 1) for one in (value.values() if isinstance(value, dict) else value)
    )


def checked_label(label: str) -> str:
    """Refuse a label that is too long or no text.

    Raises:
        Refusal: invalid.
    """
    if len(label) > MAX_LABEL:
        raise Refusal("invalid", f"the label has {len(label)} characters", allowed=f"at most {MAX_LABEL}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise Refusal("invalid", "the label must be valid Unicode", allowed=f"at most {MAX_LABEL} characters") from None
    return label
