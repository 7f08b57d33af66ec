"""One item of a gallery, what its parts may be, and the hash that tells whether it is still what was stored."""

import hashlib
import json
import re
import struct
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lam.gallery.refusal import Refusal
from lam.utils.files import sha256_of

ID_RULE = "1 to 128 letters, marks on them, digits, spaces or ._:@+=-, with no space at an end"
MAX_LABEL, MAX_METADATA, MAX_DEPTH = 1024, 16384, 32
INDEXED, SERVED = "index", "service"
VECTOR, KAPPA = 1, 2  # places in a row
_OF_ITEM = 7  # values of a row; the others are of its images
_HEAD = struct.Struct("<dqdd???9q")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # which terminals obey; tabs and line breaks are text
_ID = re.compile(r"(?!\.{1,2}$)(?! )[\w .:@+=-]{1,128}(?<! )")


@dataclass(frozen=True)
class Images:
    """The images that an item was made of.

    Attributes:
        count: how many there are.
        resultant: how far their directions agree; 1 for one image.
        least_kappa: the least of their κ; None for one image, or where it is not known.
        contents: ids by content, eight bytes each, of those of which it is known.
        paths: a list of their files as JSON; empty for what came over HTTP.
        sums: Σ κ, Σ √κ and the D numbers of Σ κμ in float64; None for one image, or where they are not known.
    """

    count: int = 1
    resultant: float = 1.0
    least_kappa: float | None = None
    contents: bytes = field(default=b"", repr=False)
    paths: str = "[]"
    sums: bytes | None = field(default=None, repr=False)


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
        origin: `service`, or `index` for what a run or `lam index` put there, which the next `lam index` replaces.
        images: what it was made of.
    """

    id: str
    vector: bytes = field(repr=False)
    kappa: float
    label: str = ""
    metadata: str = "{}"
    thumbnail: bytes | None = field(default=None, repr=False)
    origin: str = SERVED
    images: Images = Images()

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> "Item":
        """The item of which this is the `row`."""
        return cls(*row[:_OF_ITEM], images=Images(*row[_OF_ITEM:]))

    @property
    def row(self) -> tuple[Any, ...]:
        """What a database holds of it: its fields, and in the place of `images` those of its images."""
        images = self.images
        return (
            self.id, self.vector, self.kappa, self.label, self.metadata, self.thumbnail, self.origin,
            images.count, images.resultant, images.least_kappa, images.contents, images.paths, images.sums,
        )  # fmt: skip

    @property
    def sha256(self) -> bytes:
        """The hash of all of it."""
        return hash_of(self.row)

    @property
    def embedding(self) -> np.ndarray:
        """(D,) the vector as numbers."""
        return np.frombuffer(self.vector, np.float32)

    @property
    def path(self) -> str:
        """The file of its first image; empty where it came without."""
        return next(iter(json.loads(self.images.paths)), "")

    @property
    def text(self) -> str | None:
        """The text that it is, which its metadata have under that name; None of an image."""
        text = json.loads(self.metadata).get("text")
        return text if isinstance(text, str) else None

    @property
    def is_fused(self) -> bool:
        """Whether it was made of several images."""
        return self.images.count > 1

    @property
    def label_repeats_text(self) -> bool:
        """Whether the label is the text, or its beginning, as classes are called after long answers."""
        beginning, cut, _ = self.label.partition("… (")
        return self.text is not None and (self.text.startswith(beginning) if cut else self.text == self.label)

    @property
    def least_kappa(self) -> float:
        """The least κ of the item and its images."""
        return self.kappa if self.images.least_kappa is None else min(self.kappa, self.images.least_kappa)


def hash_of(row: Sequence[Any]) -> bytes:
    """The SHA-256 of an item's `row`: its numbers, the length of each text and of all bytes, and those themselves."""
    (
        item_id, vector, kappa, label, metadata, thumbnail, origin,
        count, resultant, least_kappa, contents, paths, sums,
    ) = row  # fmt: skip
    parts = (
        item_id.encode(), vector, label.encode(), metadata.encode(), thumbnail or b"", origin.encode(), contents,
        paths.encode(), sums or b"",
    )  # fmt: skip
    there = (thumbnail is not None, least_kappa is not None, sums is not None)
    head = _HEAD.pack(kappa, count, resultant, least_kappa or 0.0, *there, *map(len, parts))
    return hashlib.sha256(head + b"".join(parts)).digest()


def content_id(content: bytes) -> int:
    """The number of an image by its content: the first 63 bits of the SHA-256 of its file.

    It is the id of what comes without one, so that one image is one item whatever it is called.
    """
    return number_of(hashlib.sha256(content).hexdigest())


def file_id(path: str | Path) -> int:
    """`content_id` of a file."""
    return number_of(sha256_of(Path(path)))


def number_of(digest: str) -> int:
    """The first 63 bits of a SHA-256 in hexadecimal digits."""
    return int(digest[:16], 16) >> 1


def packed(contents: Iterable[int]) -> bytes:
    """Ids by content as bytes, eight each."""
    return b"".join(content.to_bytes(8, "big") for content in contents)


def checked_id(item_id: str) -> str:
    """Refuse what cannot be an id.

    Raises:
        Refusal: invalid.
    """
    # `\w` has no combining marks: without them neither Hindi nor Thai is written, nor é as macOS writes it
    letters = "".join("m" if unicodedata.category(letter)[0] == "M" else letter for letter in item_id)
    if _ID.fullmatch(letters) is None:
        raise Refusal("invalid", "the id is not one that an item can have", allowed=ID_RULE)
    return item_id


def checked_metadata(metadata: object) -> str:
    """Metadata as the JSON text that is stored.

    Raises:
        Refusal: invalid, for what is no object, holds NaN or halves of characters, is too deep, or too long.
    """
    if not isinstance(metadata, dict):
        raise Refusal("invalid", "metadata must be a JSON object", allowed='an object such as {"name": "value"}')
    if not metadata:
        return "{}"
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
        _is_deeper(part, levels - 1) for part in (value.values() if isinstance(value, dict) else value)
    )


def checked_label(label: str) -> str:
    """The label with accented letters composed (Unicode's NFC), once it is text, and not too long.

    Raises:
        Refusal: invalid.
    """
    if len(label) > MAX_LABEL:
        raise Refusal("invalid", f"the label has {len(label)} characters", allowed=f"at most {MAX_LABEL}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise Refusal("invalid", "the label must be valid Unicode", allowed=f"at most {MAX_LABEL} characters") from None
    if control := _CONTROL.search(label):
        raise Refusal("invalid", f"the label holds the control character {control[0]!r}", allowed="text")
    return unicodedata.normalize("NFC", label)
