"""`lam index`: what a run's gallery is filled with."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from lam.datasets import Dataset
from lam.datasets.texts import Columns
from lam.gallery.damaged import DamagedFiles
from lam.gallery.embed import embed_images, embed_items, takes_texts
from lam.gallery.enrolment import Enrolment, enrol, item_of_embedding
from lam.gallery.gallery import open_store, replace_items
from lam.gallery.image_list import read_list
from lam.gallery.local_index import require_faiss
from lam.gallery.shards import merge_embeddings
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.files import load_calibration
from lam.retrieval.index.checks import unit_vectors
from lam.retrieval.index.faiss_index import Index
from lam.runs.finished import Run, columns_of
from lam.runs.folder import GALLERY
from lam.vmf.embeddings import Embeddings


def index_images(
    run: str | Path,
    source: str | Path | Sequence[str | Path],
    *,
    columns: Columns | None = None,
    factory: str = "Flat",
    fuse: bool = False,
    skip_uncertain: bool = False,
    damaged: DamagedFiles | None = None,
    progress: bool = True,
) -> Enrolment:
    """Replace what a run's gallery was filled with by images or texts, given as a folder, a table, or embeddings.

    Items that were added or changed while serving stay. Where the run is calibrated, images are uncertain whose κ is
    below its flag for κ.

    Args:
        run: the run's folder.
        source: a folder of images, with class sub-folders or without; a table of images, see `lam.gallery.image_list`,
            or, of a run on texts, of texts; or a sequence of files of shards, see `lam.gallery.shards`.
        columns: of a file of texts; by default those that the run was trained on, or else those of usual names.
        factory: the FAISS type.
        fuse: make one item of the images of one identity; see `lam.gallery.enrolment.enrol`.
        skip_uncertain: leave uncertain images out.
        damaged: what to do with image files that cannot be read; refused by default.
        progress: show a progress bar on standard error.

    Returns:
        What was put into the gallery, and which images are uncertain.

    Raises:
        ValueError: for a folder that is no finished run or that another process writes to or serves, a type that FAISS
            does not know or that needs more images, mistakes in a table or in files of embeddings, a wish to skip where
            the run is not calibrated, or damaged files. The gallery then stays as it was.
    """
    opened = Run(run)
    encoder = opened.encoder
    require_faiss()
    Index(encoder.dimension, factory)  # refuses a type before the images are read
    with opened.lock(), open_store(opened.gallery_folder) as store:
        calibration = (
            load_calibration(opened.folder, key=opened.fingerprint) if skip_uncertain else calibration_of(opened)
        )
        flag_below = None if calibration is None else calibration.kappa_below
        if not isinstance(source, str | Path):
            sources, embeddings = merge_embeddings(source, encoder=opened.fingerprint)
        elif Path(source).is_file() and not takes_texts(encoder):
            sources, embeddings = embed_images(
                encoder, read_list(source, repeated_ids=fuse), damaged=damaged, progress=progress
            )
        else:
            columns = columns_of(opened, columns)
            whole = embed_items(encoder, source, columns=columns, damaged=damaged, progress=progress)
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
        item_of_embedding(str(row), vectors[row], kappa[row], label, images.preview(row))
        for row, label in enumerate(labels)
    ]
    with open_store(run / GALLERY) as store:
        replace_items(store, Enrolment(tuple(items), embeddings))
