"""`lam index` and `lam search`: what a run's gallery is filled with, and what is found in it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lam.datasets import Dataset
from lam.datasets.folder import image_files
from lam.datasets.texts import Columns
from lam.gallery.embed import BATCH, embed_images, embed_items, is_cut, preprocessing_of, takes_texts
from lam.gallery.enrolment import Enrolled, enrol, item_of_embedding
from lam.gallery.gallery import open_store, replace_items
from lam.gallery.image_list import read_list
from lam.gallery.item import Item
from lam.gallery.local_index import require_faiss
from lam.gallery.shards import merge_embeddings
from lam.inputs import Preprocessing, TextPreprocessing
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.decisions import SearchDecisions
from lam.retrieval.decisions.files import load_calibration
from lam.retrieval.index.entries import unit_vectors
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits, label_numbers
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.runs.calibration_report import answer_in_words
from lam.runs.finished import Run, columns_of
from lam.runs.folder import GALLERY
from lam.utils.checks import check_at_least
from lam.vmf.embeddings import Embeddings

_SHOWN = 40


def index_images(
    run: str | Path,
    *,
    folder: str | Path | None = None,
    listed: str | Path | None = None,
    columns: Columns | None = None,
    embedded: Sequence[str | Path] | None = None,
    factory: str = "Flat",
    fuse: bool = False,
    skip_uncertain: bool = False,
    progress: bool = True,
) -> Enrolled:
    """Replace what a run's gallery was filled with by images or texts, given as a folder, a file, or embeddings.

    Items that were added or changed while serving stay. Where the run is calibrated, images are uncertain whose κ is
    below its flag for κ.

    Args:
        run: the run's folder.
        folder: images, with class sub-folders or without; of a run on texts a table of them.
        listed: a table of images, see `lam.gallery.image_list`; of a run on texts, as `folder`.
        columns: of a file of texts; by default those that the run was trained on, or else those of usual names.
        embedded: files of shards; see `lam.gallery.shards`.
        factory: the FAISS type.
        fuse: make one item of the images of one identity; see `lam.gallery.enrolment.enrol`.
        skip_uncertain: leave uncertain images out.
        progress: show a progress bar on standard error.

    Returns:
        What was put into the gallery, and which images are uncertain.

    Raises:
        ValueError: for none or several of the three, a folder that is no finished run or that another process writes
            to or serves, a type that FAISS does not know or that needs more images, mistakes in a list or in files of
            embeddings, a wish to skip where the run is not calibrated, or naming a file that is no image. The gallery
            then stays as it was.
    """
    if sum(source is not None for source in (folder, listed, embedded)) != 1:
        raise ValueError("give the images to index as one of a folder, a table, or files of embeddings")
    opened = Run(run)
    encoder = opened.encoder
    require_faiss()
    Index(encoder.dimension, factory)  # refuses a type before the images are read
    with opened.lock(), open_store(opened.gallery_folder) as store:
        calibration = (
            load_calibration(opened.folder, key=opened.fingerprint) if skip_uncertain else calibration_of(opened)
        )
        flag_below = None if calibration is None else calibration.kappa_below
        if embedded is not None:
            sources, embeddings = merge_embeddings(embedded, encoder=opened.fingerprint)
        elif listed is not None and not takes_texts(encoder):
            sources = read_list(listed, repeated_ids=fuse)
            embeddings = embed_images(encoder, sources, progress=progress)
        else:
            whole = embed_items(encoder, folder or listed or "", columns=columns_of(opened, columns), progress=progress)
            sources, embeddings = whole.sources, whole.embeddings
        enrolled = enrol(sources, embeddings, flag_below=flag_below, skip_uncertain=skip_uncertain, fuse=fuse)
        replace_items(store, enrolled if takes_texts(encoder) else enrolled.with_thumbnails(), factory=factory)
    return enrolled


def calibration_of(run: Run) -> Calibration | None:
    """The calibration of a run; None where it has none, or, with a warning, where it is not of its encoder."""
    try:
        return run.calibration
    except ValueError as error:
        warnings.warn(f"{error}; nothing is flagged", stacklevel=3)
        return None


def index_dataset(run: Path, embeddings: Embeddings, images: Dataset) -> None:
    """Fill the gallery of a run that ends by the embedded items of a data set, under their positions."""
    vectors, kappa = unit_vectors(embeddings, embeddings.dimension).numpy(), embeddings.kappa.double().tolist()
    labels = [images.classes[label].encode(errors="replace").decode() for label in images.labels.tolist()]
    items = [
        item_of_embedding(str(row), vectors[row], kappa[row], label, images.shown(row))
        for row, label in enumerate(labels)
    ]
    with open_store(run / GALLERY) as store:
        replace_items(store, Enrolled(tuple(items), embeddings))


@dataclass(frozen=True)
class SearchResult:
    """The answers to Q images or texts.

    Attributes:
        images: the files, or the texts.
        queries: their embeddings.
        hits: the nearest items of each.
        items: what each hit is, without its thumbnail.
        decisions: what is answered, where the run is calibrated.
        doubts: why each image is uncertain, in words, where the encoder has learnt its ambiguity.
        calibration: of the run, where it has one.
        unseen: p-values of "this item is of a new class" and of "this item is of a class in the gallery", where the
            calibration can tell; see `Calibration.unseen_p_values`.
    """

    images: tuple[Path | str, ...]
    queries: Embeddings
    hits: Hits
    items: tuple[tuple[Item, ...], ...]
    decisions: SearchDecisions | None
    doubts: tuple[str, ...] = ()
    calibration: Calibration | None = None
    unseen: tuple[tuple[float, float] | None, ...] = ()

    def is_uncertain(self, item: Item) -> bool | None:
        """Whether an image of the item is below the flag for κ; None where the run is not calibrated."""
        return None if self.calibration is None else item.least_kappa < self.calibration.kappa_below

    def decision_in_words(self, row: int) -> list[str]:
        """Why the decision is what it is, in lines, each with its event and its condition."""
        if self.decisions is None or self.calibration is None:
            return []
        flag = self._flag_in_words(self.decisions, self.calibration, row)
        lines = [flag] if flag else []
        if self.decisions.decision[row] != "abstain":
            lines += answer_in_words(self.calibration, self.decisions, row)
        if (unseen := self.unseen[row]) is not None:
            lines.append(
                f"p-value of a new class {unseen[0]:.2g}, of a class in the gallery {unseen[1]:.2g}: a small one"
            )
            lines.append("  speaks against it, if the gallery is a random sample of what comes in")
        return lines

    def _flag_in_words(self, decisions: SearchDecisions, calibration: Calibration, row: int) -> str:
        """By what a query is flagged, or, in place of the flag in force, was judged; nothing where it is by that."""
        by, flag = decisions.flagged_by[row], calibration.flag
        why = "not all hits have a label" if self.items[row] else "nothing was found"
        words = by if by == flag else f"{by} in place of {flag}, as {why}"
        if decisions.decision[row] == "abstain":
            return f"flagged by {words}: a share {float(decisions.p_value[row]):.2g} of known queries is as unusual"
        return "" if by == flag else f"judged by {words}"


def search(
    run: str | Path, *images: str | Path, texts: Sequence[str] = (), k: int = 5, progress: bool = False
) -> SearchResult:
    """Search a run's gallery for images or for texts.

    Args:
        run: the run's folder.
        images: files, and folders, whose images are all searched for.
        texts: of a run on texts, in place of images; a warning says where a network reads only the beginning of one.
        k: how many hits each gets, at least 1.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: for k below 1, no image and no text at all, or both, naming a file that is no image, or an empty
            text.
    """
    check_at_least("k", k, 1)
    folders = (image_files(path) if path.is_dir() else [path] for path in map(Path, images))
    files = tuple(file for folder in folders for file in folder)
    if not files and images:
        raise ValueError(f"there are no images in {', '.join(map(str, images))}")
    if bool(files) == bool(texts):
        raise ValueError("there must be images to search for, files or folders that hold some, or texts, and not both")
    opened = Run(run)
    encoder = opened.encoder
    require_faiss()
    preprocessing: Any
    preprocessing = preprocessing_of(encoder, TextPreprocessing) if texts else preprocessing_of(encoder, Preprocessing)
    gallery, asked = opened.gallery, tuple(texts) if texts else files
    size = BATCH if preprocessing.shape is not None else 1
    parts = [asked[start : start + size] for start in range(0, len(asked), size)]
    batches = (torch.stack([preprocessing(one) for one in part]) for part in parts)
    for text in texts:
        if is_cut(encoder.network, preprocessing, text):
            warnings.warn(f"{text[:_SHOWN]!r}... is longer than the network reads: it was cut", stacklevel=2)
    prediction = encoder.predict(batches, n_samples=gallery.mean_samples, progress=progress and len(parts) > 1)
    queries, decisions, calibration = prediction.embeddings, None, opened.calibration
    unseen: list[tuple[float, float] | None] = [None] * len(asked)
    hits = gallery.search(queries, k if calibration is None else max(k, N_HITS))
    if calibration is not None:
        labels = label_numbers([gallery.items[place].label for place in row] for row in hits.ids.tolist())
        decisions = calibration.decide(
            hits, queries, features=prediction.features, labels=labels, gallery_size=len(gallery)
        )
        firsts = [gallery.items[row[0]].label if row else "" for row in hits.ids.tolist()]
        unseen = calibration.unseen_p_values(decisions.score, firsts)
    hits = hits[:, :k]
    items = tuple(tuple(gallery.items[place] for place in row) for row in hits.ids.tolist())
    doubts = () if encoder.ambiguity is None else tuple(encoder.ambiguity.doubts(queries))
    return SearchResult(asked, queries, hits, items, decisions, doubts, calibration, tuple(unseen))
