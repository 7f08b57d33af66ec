"""What `lam index` made is the first content of a store; where it is made anew, its items are replaced there.

What is deleted while serving is erased from the run's index too, or it would be back after the next start.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from PIL import Image

from lam.datasets import FolderImages, ImageDataset
from lam.files import MANIFEST, sha256_of
from lam.gallery import read_items, remove_items
from lam.preprocessing import open_image
from lam.retrieval import index_files
from lam.run_data import load_data
from lam.service.errors import busy
from lam.service.images import thumbnail
from lam.service.items import Item
from lam.service.store import ItemStore, Operation
from lam.settings import load_config

ORIGIN, FACT = "index", "index_manifest"
_LOG = logging.getLogger(__name__)


def take_over(run: Path, store: ItemStore) -> str:
    """Put the items of the run's index into the store, where that has not been done.

    Items that were added or changed while serving stay as they are.

    Returns:
        The FAISS type of the run's index; Flat where there is none.

    Raises:
        CorruptFileError: naming a file that is missing, truncated or altered.
        ServiceError: 507, where it could not be stored.
    """
    if not (run / "index" / MANIFEST).is_file():
        return "Flat"
    manifest = sha256_of(run / "index" / MANIFEST)
    saved = index_files.load(run / "index")
    if store.fact(FACT) != manifest:
        store.write(_operations(run, saved, store), facts={FACT: manifest})
        store.erase_log()
    return saved.factory


def erase(run: Path, ids: Iterable[str]) -> dict[str, str]:
    """Take items out of the run's index, if it holds them.

    Returns:
        What the store shall remember of it.

    Raises:
        ServiceError: 503, where another process is writing to the run.
    """
    numbers = [int(identity) for identity in ids if identity.isdecimal()]
    if not numbers or not (run / "index" / MANIFEST).is_file():
        return {}
    try:
        removed = remove_items(run, numbers)
    except ValueError as error:
        _LOG.warning("nothing can be erased from the run's index: %s", error)
        raise busy("the run's index is being written, or cannot be; nothing was deleted", after=5) from None
    return {FACT: sha256_of(run / "index" / MANIFEST)} if removed else {}


def _operations(run: Path, saved: index_files.SavedIndex, store: ItemStore) -> Iterator[Operation]:
    ids = saved.store.column("ids").tolist()
    items = read_items(run, ids)
    replaced = set(store.ids_of_origin(ORIGIN))
    yield from replaced - set(map(str, ids))
    dataset = _dataset(run, items)
    vectors, kappa = saved.store.column("vectors").numpy(), saved.store.column("kappa").tolist()
    for row, (identity, item) in enumerate(zip(ids, items, strict=True)):
        name = str(identity)
        if name in replaced or store.get(name) is None:
            picture = _picture(item, dataset, identity)
            yield Item(name, vectors[row].tobytes(), kappa[row], item["label"], "{}", picture, ORIGIN)


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
            return thumbnail(open_image(item["path"])) if Path(item["path"]).is_file() else None
        if item["path"] != f"{dataset.name} test {position}" or position >= len(dataset):
            return None
        values, label = dataset[position]
        if isinstance(label, torch.Tensor) or dataset.classes[label] != item["label"]:
            return None
    except ValueError:
        return None
    pixels = dataset.preprocessing.denormalize(values).mul(255).round().byte().permute(1, 2, 0).numpy()
    return thumbnail(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
