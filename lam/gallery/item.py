"""One item of a gallery, the limits of its fields, and its content hash."""

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

ID_RULE = (
    "1 to 128 letters, marks on them, digits, spaces or .,_:@+=~&'!()[]-, with no space at an end; or several such "
    "parts joined by /, none of them . or .., the last neither search nor thumbnail"
)
_MAX_ID = 128
MAX_LABEL, MAX_METADATA, MAX_DEPTH = 1024, 16384, 32
INDEXED, SERVED = "index", "service"
VECTOR, KAPPA = 1, 2  # positions in a row
COLUMNS = "id, vector, kappa, label, metadata, thumbnail, origin, images, resultant, least_kappa, contents, paths, sums"
"""The columns of a row in the database, in the order of the fields of `Item`."""
_TYPES = (
    str, bytes, float, str, str, bytes | None, str, int, float, float | None, bytes, str, bytes | None,
)  # of the columns  # fmt: skip
_HEAD = struct.Struct("<dqdd???9q")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # terminals obey these; tabs and line breaks pass
_PART = re.compile(r"(?!\.{1,2}$)(?! )[\w .,:@+=~&'!()\[\]-]+(?<! )")
_ENDS = ("search", "thumbnail")  # last parts of the addresses below an item's address


@dataclass(frozen=True)
class Item:
    """An item of a gallery.

    Attributes:
        id: stable id, chosen by the client.
        vector: a unit vector of D float32 numbers, as bytes.
        kappa: concentration of the embedding.
        label: class of the item; empty without a label.
        metadata: a JSON object, as text.
        thumbnail: a small picture, or None.
        origin: `index` for an item from a run or `lam index` (the next `lam index` replaces it), else `service`.
        images: number of its images.
        resultant: mean resultant length of the images' directions; 1 for one image.
        least_image_kappa: least κ of the images; None for one image, or if unknown.
        contents: known `content_id`s of the images, eight bytes each.
        paths: a JSON list of the image files; empty for images from HTTP.
        sums: Σ κ, Σ √κ and the D components of Σ κμ in float64, over directions μ and concentrations κ of the images;
            None for one image, or if unknown.
    """

    id: str
    vector: bytes = field(repr=False)
    kappa: float
    label: str = ""
    metadata: str = "{}"
    thumbnail: bytes | None = field(default=None, repr=False)
    origin: str = SERVED
    images: int = 1
    resultant: float = 1.0
    least_image_kappa: float | None = None
    contents: bytes = field(default=b"", repr=False)
    paths: str = "[]"
    sums: bytes | None = field(default=None, repr=False)

    @property
    def row(self) -> tuple[Any, ...]:
        """The item's values in the database."""
        return tuple(vars(self).values())

    @property
    def sha256(self) -> bytes:
        """Content hash, see `hash_of`."""
        return hash_of(self.row)

    @property
    def embedding(self) -> np.ndarray:
        """The vector (D,) as an array."""
        return np.frombuffer(self.vector, np.float32)

    @property
    def path(self) -> str:
        """The file of the first image; an empty text without a file."""
        return next(iter(json.loads(self.paths)), "")

    @property
    def text(self) -> str | None:
        """The content of a text item, in its metadata; None for an image or a vector, whose `text` is a plain fact."""
        text = json.loads(self.metadata).get("text")
        if not isinstance(text, str) or self.thumbnail is not None:
            return None
        is_content = not self.contents or pack([content_id(text.encode())]) in self.content_ids
        return text if is_content else None

    @property
    def content_ids(self) -> set[bytes]:
        """The known contents, eight bytes each."""
        return {self.contents[start : start + 8] for start in range(0, len(self.contents), 8)}

    @property
    def has_thumbnail(self) -> bool:
        """Whether the item has a small picture."""
        return self.thumbnail is not None

    @property
    def is_fused(self) -> bool:
        """Whether the item has several images."""
        return self.images > 1

    @property
    def label_repeats_text(self) -> bool:
        """Whether the label is the item's text, or the shortened text of a long answer."""
        beginning, cut, _ = self.label.partition("… (")
        return self.text is not None and (self.text.startswith(beginning) if cut else self.text == self.label)

    @property
    def least_kappa(self) -> float:
        """The least κ of the item and its images."""
        return self.kappa if self.least_image_kappa is None else min(self.kappa, self.least_image_kappa)


@dataclass(frozen=True)
class ItemInfo:
    """An item without its vector and picture; `images` is the number of images, `resultant` as in `Item`."""

    id: str
    label: str
    metadata: str
    images: int
    resultant: float
    least_kappa: float
    kappa: float
    sha256: bytes
    has_thumbnail: bool


def hash_of(row: Sequence[Any]) -> bytes:
    """SHA-256 of an item's `row`: its numbers, the lengths of its strings, and the strings."""
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


def is_whole(row: Sequence[Any], sha256: bytes) -> bool:
    """Whether the values of a row have the right types, and their hash is `sha256`."""
    return all(map(isinstance, row, _TYPES)) and hash_of(row) == sha256


def content_id(content: bytes) -> int:
    """First 63 bits of the SHA-256 of an image file, a text or a vector: the default id of its item."""
    return number_of(hashlib.sha256(content).hexdigest())


def file_id(path: str | Path) -> int:
    """`content_id` of a file."""
    return number_of(sha256_of(Path(path)))


def number_of(digest: str) -> int:
    """The first 63 bits of a SHA-256 in hexadecimal."""
    return int(digest[:16], 16) >> 1


def pack(contents: Iterable[int]) -> bytes:
    """Content numbers as bytes, eight each."""
    return b"".join(content.to_bytes(8, "big") for content in contents)


def check_id(item_id: str) -> str:
    """The id unchanged; an id that breaks `ID_RULE` is refused with 422."""
    # `\w` does not match combining marks, which Hindi, Thai and the é of macOS need
    letters = "".join("m" if unicodedata.category(letter)[0] == "M" else letter for letter in item_id)
    *above, last = letters.split("/")
    is_valid = len(letters) <= _MAX_ID and all(_PART.fullmatch(part) for part in (*above, last))
    if not is_valid or (above and last in _ENDS):
        raise Refusal(422, "the id breaks the rule for ids", allowed=ID_RULE)
    return item_id


def metadata_json(metadata: object) -> str:
    """Metadata as JSON text for the store; invalid or too large metadata are refused with 422."""
    if not isinstance(metadata, dict):
        raise Refusal(422, "metadata must be a JSON object", allowed='an object such as {"name": "value"}')
    if _is_deeper(metadata, MAX_DEPTH):
        raise Refusal(422, f"metadata is nested more than {MAX_DEPTH} deep", allowed=f"at most {MAX_DEPTH} levels")
    try:
        size = len(json.dumps(metadata, ensure_ascii=False).encode())
        text = json.dumps(metadata, allow_nan=False, sort_keys=True)
    except UnicodeEncodeError:
        raise Refusal(422, "metadata must be valid Unicode", allowed="JSON") from None
    except ValueError:
        raise Refusal(422, "metadata must be finite numbers, text, lists and objects", allowed="JSON") from None
    if size > MAX_METADATA:
        raise Refusal(422, f"metadata has {size} bytes", allowed=f"at most {MAX_METADATA}")
    return text


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _is_deeper(part, levels - 1) for part in (value.values() if isinstance(value, dict) else value)
    )


def normalize_label(label: str) -> str:
    """The label in Unicode's NFC form, without blanks at its ends, so that equal labels have equal bytes.

    A label that is too long, is not valid Unicode, or holds a control character is refused with 422.
    """
    if len(label) > MAX_LABEL:
        raise Refusal(422, f"the label has {len(label)} characters", allowed=f"at most {MAX_LABEL}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise Refusal(422, "the label must be valid Unicode", allowed=f"at most {MAX_LABEL} characters") from None
    if control := _CONTROL.search(label):
        raise Refusal(422, f"the label holds the control character {control[0]!r}", allowed="text")
    return unicodedata.normalize("NFC", label).strip()
