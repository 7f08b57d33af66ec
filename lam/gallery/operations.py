"""Operations that change the items, and their effects."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lam.gallery.filters import Filter
from lam.gallery.fusing import fuse
from lam.gallery.item import Item, metadata_json
from lam.gallery.refusal import Refusal


@dataclass(frozen=True)
class Change:
    """The effect of one operation: the removed keys, and the stored item with its key (None if no item is stored).

    Attributes:
        created: whether the id of the item is new.
        parts: for a `Batch`, the effect or refusal of each operation in it.
    """

    removed: tuple[int, ...] = ()
    key: int | None = None
    created: bool = False
    item: Item | None = None
    parts: "tuple[Change | Refusal, ...]" = ()


@dataclass(frozen=True)
class Fuse:
    """An item of one image. It is fused into the stored item with the same id, or added if the id is new."""

    item: Item

    def over(self, old: Item) -> Item:
        """The fused item; refusals as in `fuse`."""
        return fuse(old, self.item)


@dataclass(frozen=True)
class Replace:
    """An item that replaces the stored item with its id, but keeps the old label, the old metadata, or both.

    Old metadata lose their `text`, because it is the old content.
    """

    item: Item
    keeps: Sequence[str]

    def over(self, old: Item) -> Item:
        """The new item with the fields that it keeps from the old one; metadata that are too long are refused."""
        item = replace(self.item, label=old.label) if "label" in self.keeps else self.item
        if "metadata" not in self.keeps:
            return item
        kept = {name: value for name, value in json.loads(old.metadata).items() if name != "text"}
        return replace(item, metadata=metadata_json(kept | json.loads(item.metadata)))


@dataclass(frozen=True)
class Patch:
    """A change of an item's label and metadata; an unknown id has no effect.

    Attributes:
        label: the new label; None keeps the old one.
        metadata: new values by name; None as a value removes the name, other names stay.
    """

    id: str
    label: str | None
    metadata: Mapping[str, Any]

    def over(self, old: Item) -> Item:
        """The changed item; a new `text` for a text item, or metadata that are too long, are refused."""
        metadata = json.loads(old.metadata)
        if "text" in self.metadata and old.text is not None:
            raise Refusal("conflict", "the text is the content of the item", allowed="PUT with another text")
        metadata |= self.metadata
        kept = {name: value for name, value in metadata.items() if value is not None or name not in self.metadata}
        return replace(old, label=old.label if self.label is None else self.label, metadata=metadata_json(kept))


@dataclass(frozen=True)
class DeleteWhere:
    """The deletion of all items that pass a filter."""

    where: Filter


@dataclass(frozen=True)
class Batch:
    """Items to add, replace or fuse in one transaction; with `whole`, one refused item undoes all."""

    operations: Sequence[Item | Replace | Fuse]
    whole: bool


Operation = Item | Replace | Fuse | Patch | DeleteWhere | Batch | str
"""An item to add, replace or fuse; a patch; a deletion by filter; a batch; or the id of an item to delete."""
