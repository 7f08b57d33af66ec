"""What `lam index` made is the first content of a store; where it is made anew, its items are replaced there.

What is deleted while serving is erased from the run's index too. The store remembers, in the same transaction, what is
to be erased: where that fails or the process ends, the next deletion or the next start goes on with it.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lam.datasets import FolderImages, ImageDataset
from lam.gallery.enrolment import name_of
from lam.gallery.item import Images, Item, checked_id, checked_label, checked_metadata, packed
from lam.gallery.refusal import Refusal
from lam.gallery.store import ItemStore, Operation
from lam.inputs.preprocessing import open_image
from lam.retrieval.index import files as index_files
from lam.runs.config_files import load_config
from lam.runs.data import load_data
from lam.runs.index import held_items, read_items, remove_items
from lam.service.images import THUMBNAIL, thumbnail
from lam.utils.files import MANIFEST, sha256_of

ORIGIN, FACT = "index", "index_taken_over"
BY_NUMBER = "index_manifest"
"""The fact of a store that took the index over under its numbers, as it once was done; until `lam index` is run anew it
knows those items so."""
TO_ERASE = "to_erase"
"""The fact of a store that names, in lines, what was deleted and is not yet erased from the run's index."""
_LOG = logging.getLogger(__name__)


def take_over(run: Path, store: ItemStore) -> str:
    """Put the items of the run's index into the store, where that has not been done, under the ids of their list.

    Items that were added or changed while serving stay as they are, and those that were deleted stay away.

    Returns:
        The FAISS type of the run's index; Flat where there is none.

    Raises:
        CorruptFileError: naming a file that is missing, truncated or altered.
        ValueError: for an item that cannot be served, by its file.
        Refusal: full, where it could not be stored.
    """
    deleted, manifest = erase(run, store), run / "index" / MANIFEST
    if not manifest.is_file():
        return "Flat"
    sha256, saved = sha256_of(manifest), index_files.load(run / "index")
    if _taken_over(store) != sha256:
        store.write(_operations(run, saved, store, deleted), facts={FACT: sha256})
    return saved.factory


def to_erase(run: Path, ids: Sequence[str], store: ItemStore) -> dict[str, str]:
    """Give what the store shall remember with a deletion, so that it can be finished whatever happens in between.

    Args:
        run: the run's folder.
        ids: of what is deleted.
        store: from which it is deleted.

    Returns:
        The fact that names what the run's index then holds too much; nothing, where it holds none of it.
    """
    manifest = run / "index" / MANIFEST
    if not ids or not manifest.is_file():
        return {}
    try:
        held = held_items(run, ids, by_number=_is_by_number(manifest, store))
    except (ValueError, OSError) as error:
        _LOG.warning("it cannot be told what the run's index holds: %s", error)
        held = set(ids)
    return {TO_ERASE: "\n".join(sorted(_unerased(store) | held))} if held else {}


def erase(run: Path, store: ItemStore) -> set[str]:
    """Take out of the run's index what was deleted; what it holds under the same number by another id stays.

    An index that was made anew meanwhile is still to be taken over.

    Returns:
        The ids of what it may still hold, because it could not be written.
    """
    names, manifest = _unerased(store), run / "index" / MANIFEST
    if not names:
        return names
    facts = {TO_ERASE: ""}
    try:
        if manifest.is_file():
            taken_over, by_number = _is_taken_over(manifest, store), _is_by_number(manifest, store)
            remove_items(run, names, by_number=by_number)
            if taken_over:
                facts[BY_NUMBER if by_number else FACT] = sha256_of(manifest)
        store.write([], facts=facts)
    except Exception as error:  # whatever it was, the deletion stands
        _LOG.warning("the run's index may still hold what was deleted: %s", error)
        return names
    return set()


def _unerased(store: ItemStore) -> set[str]:
    return set((store.fact(TO_ERASE) or "").splitlines())


def _is_taken_over(manifest: Path, store: ItemStore) -> bool:
    return sha256_of(manifest) == _taken_over(store)


def _is_by_number(manifest: Path, store: ItemStore) -> bool:
    return _is_taken_over(manifest, store) and store.fact(FACT) is None


def _taken_over(store: ItemStore) -> str | None:
    taken = store.fact(FACT)
    return store.fact(BY_NUMBER) if taken is None else taken


def _operations(run: Path, saved: index_files.SavedIndex, store: ItemStore, deleted: set[str]) -> Iterator[Operation]:
    ids = saved.store.column("ids").tolist()
    items = read_items(run, ids)
    names = [name_of(number, item) for number, item in zip(ids, items, strict=True)]
    replaced = set(store.ids_of_origin(ORIGIN))
    yield from replaced - set(names)
    dataset = _dataset(run, items)
    vectors, kappa = saved.store.column("vectors"), saved.store.column("kappa").tolist()
    for row, (name, item) in enumerate(zip(names, items, strict=True)):
        if name in replaced or (name not in deleted and store.get(name) is None):
            name, label, metadata = _checked(name, item)
            picture, images = _picture(item, dataset, ids[row]), _images(item, vectors[row])
            yield Item(name, vectors[row].tobytes(), kappa[row], label, metadata, picture, ORIGIN, images)


def _checked(name: str, item: dict[str, Any]) -> tuple[str, str, str]:
    try:
        return checked_id(name), checked_label(item["label"]), checked_metadata(item.get("metadata", {}))
    except Refusal as error:
        raise ValueError(
            f"{item['path']} cannot be served under id {name!r}: {error}; it must be {error.allowed}: change it in the "
            "list and run `lam index` again"
        ) from None


def _images(item: dict[str, Any], vector: np.ndarray) -> Images:
    """What is known of the images of an item; their sums only where the index was made with each one's κ."""
    contents = packed(item.get("contents", []))
    if "fused" not in item:
        return Images(contents=contents)
    count, resultant = item["fused"]["images"], item["fused"]["resultant"]
    kappa = np.array(item["fused"].get("kappa", []))
    if not len(kappa):
        return Images(count, resultant, item.get("poor"), contents)
    sums = np.concatenate([[kappa.sum(), np.sqrt(kappa).sum()], resultant * kappa.sum() * vector.astype(np.float64)])
    return Images(count, resultant, kappa.min().item(), contents, sums.tobytes())


def _dataset(run: Path, items: list[dict[str, str]]) -> ImageDataset | None:
    """The test split, where the index was made of it: its items need not have a file of their own."""
    if not items or Path(items[0]["path"]).is_file():
        return None
    try:
        config = load_config(run, [])
        config.data.ood = []
        test = load_data(config.data)[0].test
    except (ValueError, OSError) as error:
        _LOG.warning("there are no pictures of the items: %s", error)
        return None
    return None if isinstance(test, FolderImages) else test


def _picture(item: dict[str, str], dataset: ImageDataset | None, position: int) -> bytes | None:
    try:
        if dataset is None:
            return thumbnail(open_image(item["path"], 2 * THUMBNAIL)) if Path(item["path"]).is_file() else None
        if item["path"] != f"{dataset.name} test {position}" or position >= len(dataset):
            return None
        values, label = dataset[position]
        if isinstance(label, torch.Tensor) or dataset.classes[label] != item["label"]:
            return None
    except ValueError:
        return None
    pixels = dataset.preprocessing.denormalize(values).mul(255).round().byte().permute(1, 2, 0).numpy()
    return thumbnail(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
