"""The data of a run, loaded, limited and checked before training."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lam import datasets
from lam.datasets import Dataset, MissingDataError, Splits, Texts
from lam.datasets.published import read_soft_labels
from lam.datasets.splits import hold_out_classes
from lam.encoders.base import Encoder
from lam.gallery.embed import DamagedFiles, is_cut, path_key, read_images, without_damaged, write_damaged
from lam.gallery.item import metadata_json
from lam.gallery.refusal import Refusal
from lam.pairs.pairs import check_labels
from lam.retrieval.metrics.reference import NEIGHBOUR, Reference
from lam.runs import copies
from lam.runs.config import DataConfig, RunConfig
from lam.runs.corruption import corruptions_of
from lam.runs.folder import DAMAGED, DATA, left_out
from lam.utils import distributed

EMBEDDING_BATCH = 500
_WITHOUT_MATCHES = {
    "texts": ", such as questions with answers (columns question and answer), or search with the network as it is, "
    "without training and matches: lam run texts knn_distance --network.head=identity --data.root=FILE",
    "images": ", at least eleven images with two or more of each class, in one folder for each class, or take a "
    "method without labels, such as simclr",
}
_LEARNT_LATER = {
    "texts": "; `lam calibrate RUN --folder FILE` learns that from questions with answers, or texts with labels",
    "images": "; `lam index RUN DIR` and `lam calibrate RUN --folder OTHER` learn that from images in class folders",
}
_DOWNLOAD = "--data.options='{download: true}'"


def load_data(
    data: DataConfig, damaged: frozenset[str] = frozenset(), *, root_option: str = "in a run: --data.root=DIR"
) -> tuple[Splits, dict[str, Dataset]]:
    """The splits (held-out classes become strangers) and the OOD sets by title, each cut to `limit` items.

    Image files at the paths `damaged` are left out. The error about missing files recommends the `root_option`.
    """
    options = data.options | _skipping(data.name, data)
    with _naming_setting(root_option), warnings.catch_warnings(record=True) as caught:
        splits = datasets.load(data.name, root=data.root, seed=data.seed, **options)
    for each in caught:
        warnings.warn(each.message, each.category, stacklevel=2)
    splits = replace(splits, notes=tuple(str(each.message) for each in caught))
    if data.soft_labels is not None:
        splits.test.soft_labels = read_soft_labels(data.soft_labels, len(splits.test))
    splits = hold_out_classes(splits, data.strangers, seed=data.seed)
    if data.gallery is not None:
        splits = replace(splits, gallery=data.gallery)
    ood: dict[str, Dataset] = {}
    for outside in data.ood:
        with _naming_setting(f"in a run: --data.ood='[{{name: {outside.name}, root: DIR}}]'"):
            its_options = outside.options | _skipping(outside.name, data)
            ood[outside.key] = datasets.load_ood(
                outside.name, like=splits.test, root=outside.root, seed=data.seed, **its_options
            )
    if data.limit is not None:
        limit, seed = data.limit, data.seed
        splits = replace(splits, **{name: part.limit(limit, seed=seed) for name, part in splits.parts().items()})
        ood = {name: images.limit(limit, seed=seed) for name, images in ood.items()}
    if data.duplicates == "drop":
        splits, ood, _ = copies.without_copies(splits, ood)
    return leave_out(splits, ood, damaged)


def _skipping(name: str, data: DataConfig) -> dict[str, Any]:
    """The option that leaves out empty cells of a table, if the settings skip damaged items."""
    return {"skip_empty": True} if data.skip_damaged and name == "texts" else {}


@dataclass(frozen=True)
class RunData:
    """The checked data of a run: splits, OOD sets by title, copies, and damaged image files with the reasons.

    `is_new`: whether the run starts for the first time.
    """

    splits: Splits
    ood: dict[str, Dataset]
    copies: Sequence[copies.Copy]
    damaged: Mapping[Path, str]
    is_new: bool

    @property
    def parts(self) -> dict[str, Dataset]:
        """All splits and OOD sets by name."""
        return parts_of(self.splits, self.ood)

    def write_lists(self, folder: Path) -> None:
        """Write the lists of copies and of damaged files, if any, into a run's folder."""
        if self.damaged:
            write_damaged(self.damaged, folder / DAMAGED)
        if self.copies:
            copies.write_copies(self.copies, folder)


def prepare_data(config: RunConfig, *, learns: bool, progress: bool) -> RunData:
    """Load the data of a run; at the first start, read and check every item.

    Damaged files and copies that the settings do not allow are errors. `learns`: whether the run learns from matches.
    """
    data, folder = config.data, config.folder
    known = left_out(folder, data.root)
    splits, ood = distributed.rank_zero_first(lambda: load_data(data, known))
    check_splits(splits, learns=learns)
    check_texts(splits.test)
    corruptions_of(splits.test, config.evaluation.corruptions)
    is_new = not (folder / DATA).is_file()
    found, damaged = distributed.broadcast_from_rank_zero(
        lambda: _check_items(config, splits, ood, progress) if is_new else (copies.read_copies(folder), {})
    )
    if damaged:
        splits, ood = leave_out(splits, ood, frozenset(map(path_key, damaged)))
        check_splits(splits, learns=learns)
    if (remark := copies.remark_on(found, data.duplicates)) is not None:
        splits = replace(splits, notes=(*splits.notes, remark))
        if is_new and distributed.is_rank_zero():
            warnings.warn(remark, stacklevel=3)
    return RunData(splits, ood, found, damaged, is_new)


def _check_items(
    config: RunConfig, splits: Splits, ood: Mapping[str, Dataset], progress: bool
) -> tuple[list[copies.Copy], dict[Path, str]]:
    """Read every image file; return the copies among the items, and the damaged files with the reasons."""
    data, folder, parts = config.data, config.folder, parts_of(splits, ood).values()
    hashes, reasons = check_files(parts, progress=progress)
    # A rejected run has no folder yet: the list is written beside it.
    listed = None if data.skip_damaged else folder.with_name(f"{folder.name}-{DAMAGED}")
    DamagedFiles(listed, data.skip_damaged, reasons).settle(sum(len(part.files) for part in parts))
    found = copies.find_copies(splits, ood, hashes)
    if data.duplicates == "drop":  # the splits no longer hold exact copies
        found = [*copies.without_copies(*load_data(replace(data, duplicates="keep")))[2], *found]
    copies.check_copies(found, data.duplicates)
    return found, reasons


def leave_out(splits: Splits, ood: Mapping[str, Dataset], damaged: frozenset[str]) -> tuple[Splits, dict[str, Dataset]]:
    """The data without image files at these paths."""
    parts = {name: without_damaged(part, damaged) for name, part in splits.parts().items()}
    return replace(splits, **parts), {name: without_damaged(images, damaged) for name, images in ood.items()}


def check_splits(splits: Splits, *, learns: bool = True) -> None:
    """Require splits that are large enough.

    A split without matching items is an error for a run that `learns` from matches, and a warning for other runs.
    """
    kind, unmatched = "texts" if isinstance(splits.train, Texts) else "images", list[str]()
    for name, part, least in (
        ("train", splits.train, NEIGHBOUR),
        ("validation", splits.validation, 2),
        ("test", splits.test, 2),
    ):
        if len(part) < least:
            raise ValueError(f"the {name} split must have at least {least} {kind}, got {len(part)}: give more data")
        if name != "train" and part.is_query is not None and len(part.is_query.unique()) == 1:
            raise ValueError(
                f"the {name} split must have queries and a gallery, got {int(part.is_query.sum())} queries among "
                f"{len(part)} {kind}: give more data, or say which items are in which split"
            )
        if part.targets.ndim == 1 and len(part.labels.unique()) == len(part):
            unmatched.append(name)
    if unmatched and learns:
        raise ValueError(
            f"no two {kind} of the {unmatched[0]} split share a label, so no query has a match: give more data"
            + _WITHOUT_MATCHES[kind]
        )
    if unmatched:
        warnings.warn(
            f"no two {kind} of the {', '.join(unmatched)} split share a label: the run cannot learn or measure which "
            "items match" + _LEARNT_LATER[kind],
            stacklevel=2,
        )
    if splits.train.targets.ndim > 1 or not learns:
        return
    try:
        check_labels(splits.train.labels)
    except ValueError as error:
        raise ValueError(f"the train split cannot be learned from: {error}; give more data") from None


def check_texts(items: Dataset) -> None:
    """Reject texts that the gallery cannot store."""
    for row in range(len(items) if isinstance(items, Texts) else 0):
        preview = items.preview(row)
        try:
            metadata_json({**preview.metadata, "text": preview.text})
        except Refusal as refusal:
            raise ValueError(
                f"{preview.path}: {refusal} with the text, allowed is {refusal.allowed}: leave columns out, or lower "
                "data.options.max_bytes"
            ) from None


def parts_of(splits: Splits, ood: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """All splits and OOD sets of a run by name."""
    return {**splits.parts(), **{copies.OOD_SET + name: images for name, images in ood.items()}}


def warn_of_cut_texts(network: nn.Module, parts: Iterable[Dataset]) -> None:
    """Warn of texts that are longer than the network reads."""
    read = {text: part.preprocessing for part in parts if isinstance(part, Texts) for text in part.texts}
    n_cut = sum(is_cut(network, preprocessing, text) for text, preprocessing in read.items())
    if n_cut:
        warnings.warn(f"{n_cut} of {len(read)} texts are longer than the network reads: cut", stacklevel=3)


def check_files(parts: Iterable[Dataset], *, progress: bool) -> tuple[dict[Path, UInt8[Tensor, " B"]], dict[Path, str]]:
    """Read every image file; return perceptual hashes (not of small or uniform images), and why files are damaged."""
    files = {path: part.preprocessing for part in parts for path in part.files}

    def hashed(path: Path, image: Tensor) -> tuple[Path, UInt8[Tensor, " B"] | None]:
        return path, copies.perceptual_hash(files[path], image)

    hashes, damaged = read_images(list(files.items()), hashed, progress=progress)
    return {path: bits for path, bits in hashes if bits is not None}, damaged


def loader_of(images: Any, num_workers: int = 0, *, batch_size: int = EMBEDDING_BATCH) -> DataLoader[Any]:
    """A loader of images or features in order; it leaves torch's global random state alone."""
    context = distributed.worker_context(num_workers)
    generator = torch.Generator()
    return DataLoader(images, batch_size, num_workers=num_workers, multiprocessing_context=context, generator=generator)


def reference_features(encoder: Encoder, images: Dataset, count: int, *, seed: int, num_workers: int = 0) -> Reference:
    """Features, embeddings and classes, if any, of at most `count` random images."""
    drawn = images.limit(count, seed=seed)
    prediction = encoder.predict(loader_of(drawn, num_workers), n_samples=2)
    labels = drawn.targets if drawn.targets.ndim == 1 else None
    return Reference.of(prediction.features.cpu(), labels, embeddings=prediction.embeddings.mean.cpu())


@contextmanager
def _naming_setting(option: str) -> Iterator[None]:
    """Within the context, an error about missing files also names the setting for their folder."""
    try:
        yield
    except MissingDataError as error:
        message = str(error).replace("allow_missing=True", "--allow-missing").replace("download=True", _DOWNLOAD)
        raise MissingDataError(f"{message} ({option})") from None
