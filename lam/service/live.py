"""What a service's store holds, read from another process while the service goes on."""

from pathlib import Path

import numpy as np
import torch

from lam.gallery.store import FILE, MARK, ItemStore
from lam.runs.calibrate import StoredItems
from lam.service.gallery import FOLDER


def stored_items(run: str | Path) -> StoredItems:
    """Read the items of a run's service, every row held to its hash.

    They are those of one moment. A DELETE that comes within the second that this takes may be answered with 503.

    Args:
        run: the run's folder.

    Returns:
        A gallery to calibrate for, see `lam.runs.calibrate.calibrate_run`.

    Raises:
        CorruptFileError: naming the file that was lost, or the rows that were altered.
        ValueError: where the run was not served yet, or holds no items, or another process has locked the file.
    """
    path = Path(run) / FOLDER / FILE
    if not path.is_file() and not path.with_name(MARK).is_file():
        raise ValueError(f"the run in {run} has no items of a service: `lam serve {run}` takes over those of its index")
    store = ItemStore(path)
    try:
        with store.one_moment():
            store.check()
            items = [item for _, item in store.keyed()]
    finally:
        store.close()
    if not items:
        raise ValueError(f"the service of the run in {run} holds no items: add some first")
    return StoredItems(
        torch.from_numpy(np.stack([item.embedding for item in items])),
        torch.tensor([item.kappa for item in items], dtype=torch.float64),
        tuple(item.label for item in items),
    )
