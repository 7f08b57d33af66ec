"""One item of the gallery, and the hash that tells whether it is still what was stored."""

import hashlib
import json
import re
import struct
from dataclasses import dataclass, field

import numpy as np

from lam.enrolment import id_of_digest
from lam.service.errors import ServiceError

_ID = re.compile(r"[A-Za-z0-9._:@+=-]{1,128}")
ID_RULE = "1 to 128 letters, digits or ._:@+=-"
MAX_LABEL, MAX_METADATA = 1024, 16384


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
    """

    id: str
    vector: bytes = field(repr=False)
    kappa: float
    label: str = ""
    metadata: str = "{}"
    thumbnail: bytes | None = field(default=None, repr=False)
    origin: str = "service"

    @property
    def sha256(self) -> bytes:
        """The hash of all of it, each part with its length."""
        digest = hashlib.sha256()
        parts = (
            self.id.encode(),
            self.vector,
            struct.pack("<d", self.kappa),
            self.label.encode(),
            self.metadata.encode(),
            b"" if self.thumbnail is None else b"\x01" + self.thumbnail,
            self.origin.encode(),
        )
        for part in parts:
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return digest.digest()

    @property
    def embedding(self) -> np.ndarray:
        """(D,) the vector as numbers."""
        return np.frombuffer(self.vector, np.float32)


def content_id(content: bytes) -> str:
    """Give the id of what comes without one: the first 63 bits of its SHA-256, as `lam index` has it."""
    return str(id_of_digest(hashlib.sha256(content).hexdigest()))


def checked_id(identity: str) -> str:
    """Refuse what cannot be an id.

    Raises:
        ServiceError: 422.
    """
    if not _ID.fullmatch(identity):
        raise ServiceError(422, "the id is not one that an item can have", allowed=ID_RULE)
    return identity


def checked_metadata(metadata: object) -> str:
    """Give metadata as the JSON text that is stored.

    Raises:
        ServiceError: 422, for what is no object, holds NaN, or is too long.
    """
    if not isinstance(metadata, dict):
        raise ServiceError(422, "metadata must be a JSON object", allowed='an object such as {"name": "value"}')
    try:
        text = json.dumps(metadata, allow_nan=False, sort_keys=True)
    except (ValueError, RecursionError):
        raise ServiceError(422, "metadata must be finite numbers, text, lists and objects", allowed="JSON") from None
    if len(text) > MAX_METADATA:
        raise ServiceError(422, f"metadata has {len(text)} characters", allowed=f"at most {MAX_METADATA}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ServiceError(422, "metadata must be valid Unicode", allowed="JSON") from None
    return text


def checked_label(label: str) -> str:
    """Refuse a label that is too long or no text.

    Raises:
        ServiceError: 422.
    """
    if len(label) > MAX_LABEL:
        raise ServiceError(422, f"the label has {len(label)} characters", allowed=f"at most {MAX_LABEL}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise ServiceError(422, "the label must be valid Unicode", allowed=f"at most {MAX_LABEL} characters") from None
    return label
