"""`lam index`: fill a run's gallery."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from lam.datasets import Dataset
from lam.datasets.texts import Columns
from lam.gallery.embed import DamagedFiles, embed_images, embed_items, takes_texts
from lam.gallery.enrolment import Enrolment, enrol, item_of_embedding
from lam.gallery.gallery import open_store, replace_items
from lam.gallery.image_list import read_list
from lam.gallery.local_index import require_faiss
from lam.gallery.shards import merge_embeddings
from lam.retrieval import Calibration, Index, load_calibration
from lam.retrieval.index.checks import unit_vectors
from lam.runs.finished import Run
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
    """Replace the items of a run's gallery by images, texts or embeddings.

    Items that a service added or changed stay. In a calibrated run, images with κ below the calibration's threshold on
    κ are uncertain.

    Args:
        source: a folder of images, with or without class sub-folders; a table of images (`lam.gallery.image_list`); a
            table of texts, for a run on texts; or a sequence of shard files (`lam.gallery.shards`).
        columns: columns of a table of texts; by default the run's columns, or the default names of `Columns`.
        factory: the FAISS index type, such as `HNSW32`.
        fuse: whether images of one identity become one item; see `lam.gallery.enrolment.enrol`.
        skip_uncertain: whether to leave out uncertain images.
        damaged: treatment of damaged image files; by default an error.
        progress: show a progress bar on standard error.

    Returns:
        The new items of the gallery, and the uncertain images.

    Raises:
        ValueError: for a folder without a finished run, or with a run that another process serves or changes; an
            unknown FAISS type, or a type that needs more images; mistakes in a table or shard files; `skip_uncertain`
            without a calibration; or damaged files. The gallery then stays unchanged.
    """
    opened = Run(run)
    encoder = opened.encoder
    require_faiss()
    Index(encoder.dimension, factory)  # rejects a wrong type before the images are read
    with opened.lock(), open_store(opened.folder / GALLERY) as store:
        calibration = (
            load_calibration(opened.folder, key=opened.fingerprint) if skip_uncertain else calibration_of(opened)
        )
        flag_below = None if calibration is None else calibration.kappa_below
        if not isinstance(source, str | Path):
            sources, embeddings = merge_embeddings(source, encoder=opened.fingerprint)
        elif Path(source).is_file() and not takes_texts(encoder):
            listed = read_list(source, repeated_ids=fuse)
            sources, embeddings = embed_images(encoder, listed, damaged=damaged, progress=progress)
        else:
            columns = opened.columns(columns)
            whole = embed_items(encoder, source, columns=columns, damaged=damaged, progress=progress)
            sources, embeddings = whole.sources, whole.embeddings
        enrolled = enrol(sources, embeddings, flag_below=flag_below, skip_uncertain=skip_uncertain, fuse=fuse)
        replace_items(store, enrolled if takes_texts(encoder) else enrolled.with_thumbnails(), factory=factory)
    return enrolled


def calibration_of(run: Run) -> Calibration | None:
    """The calibration of a run, if any; None, with a warning, for the calibration of another encoder."""
    try:
        return run.calibration
    except ValueError as error:
        warnings.warn(f"{error}; nothing is flagged", stacklevel=3)
        return None


def index_dataset(run: Path, embeddings: Embeddings, images: Dataset) -> None:
    """Fill a run's gallery with embedded images; their ids are their positions."""
    vectors, kappa = unit_vectors(embeddings, embeddings.dimension).numpy(), embeddings.kappa.double().tolist()
    labels = [images.classes[label].encode(errors="replace").decode() for label in images.labels.tolist()]
    items = [
        item_of_embedding(str(row), vectors[row], kappa[row], label, images.preview(row))
        for row, label in enumerate(labels)
    ]
    with open_store(run / GALLERY) as store:
        replace_items(store, Enrolment(tuple(items), embeddings))
