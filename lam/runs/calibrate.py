"""`lam calibrate`: from a run's folder to the thresholds and probabilities behind its answers.

Calibrated is on the run's validation split, never on its test split; or, better, on a folder of fresh images. The
validation split has chosen the epoch and tuned the likelihood scale of the run, so that it is exchangeable with new
data only nearly: two numbers were fitted to it and not the network, but a promise in the strict sense needs the fresh
folder.

The gallery is by default the run's, as that is what will be searched, with what was added while serving: its items are
found and not judged, and none of the queries may be among them. Where it holds nothing that matches the data, as with
other classes, or where there are positions and no labels, the held-out data are parted into queries and a gallery. To
search them each without itself would spare that, but two items are then often each other's nearest non-match and bring
one score twice: over 200 partings of FashionMNIST a target of 0.001 came out at 0.0019.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from lam.datasets import Dataset, Splits
from lam.datasets.texts import Columns
from lam.encoders.base import Encoder
from lam.encoders.seen import HashedBatches
from lam.gallery.damaged import DamagedFiles
from lam.gallery.embed import read_items
from lam.pairs.relevance import Relevance
from lam.retrieval.decisions.acceptance import ACCEPTS, PROBABILITY
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, OtherQueries, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets, label_key
from lam.retrieval.decisions.conformal import least_rate, needed
from lam.retrieval.decisions.density_ratio import SHARE
from lam.retrieval.decisions.files import save_calibration
from lam.retrieval.decisions.flags import FLAGS, needs_reference
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import Verifier, draw_pairs
from lam.retrieval.index.faiss_index import search_flat
from lam.retrieval.metrics.plots import plot_reliability
from lam.retrieval.metrics.reference import NEIGHBOUR, Reference, knn_distance
from lam.retrieval.metrics.searches import Searches, search_open_set
from lam.runs.calibration_gallery import (
    HELD_OUT,
    INDEX,
    half_of,
    holds_none_of,
    stored_items,
    stored_items_with_half,
)
from lam.runs.config import RunConfig
from lam.runs.data import EMBEDDING_BATCH, load_data, loader_of, reference_features
from lam.runs.finished import Run, columns_of
from lam.runs.folder import changed_parts, left_out
from lam.runs.live import live_queries
from lam.utils.checks import check_choice, check_share
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings

REFERENCE = 5000
LIVE = "live"
Gallery = Literal["index", "held-out"]
VALIDATION = "validation split"
UNSEEN = 50_000
"""Items of the largest gallery that is compared with itself, to tell items of classes that it does not hold."""
_SAME = 1e-5  # between two embeddings of one input, in batches of other sizes


def current_calibration(run: str | Path) -> Calibration | None:
    """The calibration of a run; None where it has none that can be read and is of its encoder."""
    try:
        return Run(run).calibration
    except ValueError:
        return None


@dataclass(frozen=True)
class CalibrationOptions:
    """How a run is calibrated.

    Attributes:
        targets: the error rates asked for, all of them or some by name. In place of a usual one that nobody asked for
            and that the data are too few to promise, the least that they can is promised, with a warning.
        flag: the score by which queries shall be flagged, of `lam.retrieval.decisions.flags.FLAGS`; by default the one
            that tells strangers from known queries best, by cross-validation.
        accept: what decides on a match, of `lam.retrieval.decisions.acceptance.ACCEPTS`; by default `probability`,
            unless a single score does better, by cross-validation.
        gallery: `index` searches the run's gallery, without items that have no label, whose number is among the facts;
            `held-out` searches one half of the held-out data. The default is `index`. Where a run held whole classes
            out, its gallery has no validation class: then one half of the held-out data takes the place of as many of
            its items, and a note says so.
        folder: fresh images in class sub-folders to calibrate on, instead of the validation split; of a run on texts
            a table of them, with labels or with answers.
        strangers: a folder, or such a file, of what has no match in the gallery, and of which false accepts are then
            promised. By default they are promised of the classes that the run set aside, where these are enough for the
            target; else of images like the others, whose matches are taken out of the gallery. P(known) and the flag
            learn from them, or from the classes that were set aside, however few; where there are none, from the
            queries as if their classes had never been seen.
        unlabelled: a folder, or such a file, of queries as they come, known ones and strangers: P(known) is learnt from
            these in their place, unless they may hold no stranger, or nothing else. `live`: those that `lam serve
            --keep-queries` kept. What is stored, or was trained on, is left out, with a warning.
        share_of_strangers: the share of queries without a match among those to come, where no unlabelled ones tell it.
        columns: of these files; by default those that the run was trained on, or else those of usual names.
        data_root: where the run's data are, if they have moved.
        reference: how many training items distances compare with; 0 for none.
        damaged: what to do with image files of these folders that cannot be read; refused by default.

    Raises:
        ValueError: for a choice or a number that is not allowed, or a score that compares with training items, of
            which there are to be none.
    """

    targets: Targets | Mapping[str, float] = field(default_factory=dict)
    flag: str | None = None
    accept: str | None = None
    gallery: Gallery | None = None
    folder: str | Path | None = None
    strangers: str | Path | None = None
    unlabelled: str | Path | None = None
    share_of_strangers: float = SHARE
    columns: Columns | None = None
    data_root: str | Path | None = None
    reference: int = REFERENCE
    damaged: DamagedFiles | None = None

    def __post_init__(self) -> None:
        if self.reference != 0 and self.reference < NEIGHBOUR:
            raise ValueError(f"reference must be at least {NEIGHBOUR} items, or 0 for none, got {self.reference}")
        check_share("the share of strangers", self.share_of_strangers)
        choices = {"gallery": (self.gallery, get_args(Gallery)), "flag": (self.flag, FLAGS)}
        for name, (choice, allowed) in {**choices, "accept": (self.accept, ACCEPTS)}.items():
            if choice is not None:
                check_choice(name, choice, allowed)
        for name, by in (("flag", self.flag), ("accept", self.accept)):
            if by not in (None, PROBABILITY) and self.reference == 0 and needs_reference(by):
                raise ValueError(
                    f"{name} {by!r} compares with training features: leave out reference=0, or choose 'kappa'"
                )


def calibrate_run(run: str | Path, options: CalibrationOptions | None = None, *, progress: bool = True) -> Calibration:
    """Calibrate a finished run and keep the result in its folder.

    Args:
        run: the run's folder.
        options: by default all as they are there.
        progress: show a progress bar on standard error.

    Returns:
        The calibration that was saved.

    Raises:
        ValueError: for a folder that is no finished run, or whose data have changed; for data that are too few to
            promise a target that was asked for, saying how many it needs; for a flag without the features that it
            needs; for damaged files; or for stored items none of which matches any query.
        CorruptFileError: naming a file of the run that is missing, truncated or altered.
    """
    options = CalibrationOptions() if options is None else options
    folder, strangers, unlabelled = options.folder, options.strangers, options.unlabelled
    gallery, reference = options.gallery, options.reference
    opened = Run(run)
    encoder = opened.encoder
    data_root = options.data_root
    config = opened.configured([] if data_root is None else [f"--data.root={data_root}"])
    splits = None if folder is not None and reference == 0 else _splits(opened.folder, config)
    columns = columns_of(opened, options.columns)
    asked = None if columns is None else Columns(columns.query)  # what is foreign or unknown has no answer
    images = _held_out(encoder, options, splits, columns)
    stands_in = gallery is None and folder is None and holds_none_of(opened, images)
    gallery = HELD_OUT if stands_in else gallery or INDEX
    if gallery != HELD_OUT:
        images = images.queries
    remembered = HashedBatches(loader_of(images, EMBEDDING_BATCH))
    prediction = encoder.predict(remembered, progress=progress)
    known = None
    if splits is not None and reference:
        known = reference_features(encoder, splits.train, reference, seed=config.seed)
    if stands_in:
        searched = stored_items_with_half(opened.gallery, images, prediction.embeddings, config.seed)
    elif gallery == HELD_OUT:
        searched = half_of(encoder, images, prediction.embeddings, config)
    else:
        searched = stored_items(opened.gallery, images)
    items, relevance, labels = searched.items, searched.relevance, searched.labels
    if seen := remembered.among(encoder.trained_on, relevance.queries.tolist()):
        warnings.warn(
            f"{seen} of {len(encoder.trained_on)} training items that the encoder remembers are among those calibrated "
            "on: what is promised does not hold of others; calibrate on a --folder of items that it was not trained on",
            stacklevel=2,
        )
    queries = prediction.embeddings[relevance.queries]
    searches, verifier = _search(queries, items, relevance, config.seed)
    is_item = _find_themselves(queries.mean, items.mean, searches)
    if n_same := int((searches.correct & is_item).sum()):
        warnings.warn(
            f"{n_same} of {len(searches)} queries have the very embedding of an item: where the gallery holds the "
            "queries themselves, nothing that is promised holds; calibrate on a --folder of others",
            stacklevel=2,
        )
    targets = options.targets
    asked_rates = asdict(targets) if isinstance(targets, Targets) else dict(targets)
    targets, gallery_labels = Targets(**asked_rates), relevance.labels_of_hits(torch.arange(len(items))[None])
    gallery_labels = None if gallery_labels is None else gallery_labels[0]
    outside, promised_of = None, None
    if strangers is not None:
        unknown = read_items(encoder, strangers, asked, damaged=options.damaged).queries
        outside = promised_of = _outside(encoder, unknown, items.mean, gallery_labels, progress)
    n_strangers = int(searches.non_mated.isfinite().sum()) if outside is None else len(outside.cosines)
    targets = _promised(targets, asked_rates, {"far": n_strangers, "ood": len(queries)})
    n_set_aside = 0
    if strangers is None and splits is not None and splits.strangers is not None:
        outside = _outside(encoder, splits.strangers, items.mean, gallery_labels, progress, labels)
        n_set_aside = len(splits.strangers.labels.unique())
        promised_of = outside if n_set_aside >= needed(targets.far) else None
    mixture = None
    if unlabelled is not None:
        n_trained_on = 0 if splits is None else len(splits.train)
        mixture = _mixture(opened, options, asked, items.mean, known, n_trained_on, progress)
    right = searches.correct[searches.has_mate]
    with opened.lock():
        data = CalibrationData(
            searches,
            queries,
            features=prediction.features[relevance.queries],
            classes=None if splits is None else _numbers(images, relevance, splits.train),
            gallery_labels=gallery_labels,
            reference=known,
            strangers=outside,
            mixture=mixture,
        )
        calibration = calibrate(
            data,
            Choices(
                targets,
                options.flag,
                options.accept,
                of_strangers=promised_of is not None,
                share=options.share_of_strangers,
            ),
            key=opened.fingerprint,
            verifier=verifier,
            unseen=_unseen(opened, items, labels or ()) if searched.is_stored and not searched.without_label else None,
            facts={
                "data": VALIDATION if folder is None else str(folder),
                "asked_flag": options.flag,
                "asked_accept": options.accept,
                "asked_rates": sorted(asked_rates),
                "gallery": gallery,
                "strangers": None if strangers is None else str(strangers),
                "false_accepts": _promised_of(opened, folder, strangers, n_set_aside, targets.far),
                "answers_wrong": None
                if targets.wrong is None
                else _stream(len(searches), len(right), outside, strangers),
                "without_label": searched.without_label,
                "unlabelled": None if unlabelled is None else str(unlabelled),
                "n_unlabelled": 0 if mixture is None else len(mixture.cosines),
                "n_strangers": 0 if outside is None else len(outside.cosines),
                "queries": len(searches),
                "queries_with_match": len(right),
                "first_hit_right": float(right.double().mean()),
            },
        )
        flag = calibration.flag
        scores = calibration.detector.conformal_scores(flag).scores
        if len(scores) > 1 and scores[0] == scores[-1]:
            warnings.warn(
                f"{flag} is the same, {float(scores[0]):.6g}, of all {len(scores)} calibration queries, as votes are "
                "where every item has a label of its own: it tells no query from another; flag by another score",
                stacklevel=2,
            )
        save_calibration(opened.folder, calibration)
        plot = opened.folder / "plots" / "probability.png"
        plot_reliability(
            plot, calibration.reliability, confidence="P(the first hit is right, if the gallery holds a match)"
        )
    return calibration


def _promised(targets: Targets, asked: Mapping[str, float], counts: Mapping[str, int]) -> Targets:
    """The targets; rates that nobody asked for are raised to the least that so many calibration scores can promise."""
    few = {name: n for name, n in counts.items() if name not in asked and 0 < n < needed(getattr(targets, name))}
    least = {name: least_rate(n) for name, n in few.items()}
    if few:
        usual = {name: getattr(targets, name) for name in few}
        raised = ", ".join(
            f"{name} to {least[name]:g} ({usual[name]:g} needs {needed(usual[name])} scores, there are {n})"
            for name, n in few.items()
        )
        options = " or ".join(f"--target-{name}" for name in few)
        warnings.warn(
            f"few calibration data raise the promised rates: {raised}; give more data, or choose a rate with {options}",
            stacklevel=3,
        )
    return replace(targets, **least)


def _promised_of(
    run: Run,
    folder: str | Path | None,
    strangers: str | Path | None,
    n_set_aside: int,
    target: float,
) -> str:
    """Of whom the false-accept rate is promised; of people or products never trained on it can be many times that."""
    if strangers is not None:
        return f"of strangers like those in {strangers}"
    if n_set_aside >= needed(target):
        return f"of a random item of a class never trained on, like the {n_set_aside} classes set aside"
    known = "it was trained on; strangers" if run.config.network.head == "train" else "it was calibrated on; others"
    known = known if folder is None else f"in {folder}; other strangers"
    what = "questions" if run.has_answers else run.gallery_kind
    sentence = f"of {what} like those {known} are not promised"
    if not n_set_aside:
        return sentence
    least = least_rate(n_set_aside)
    return f"{sentence}: {n_set_aside} classes set aside can promise {least:g} or more (--target-far {least:g})"


def _stream(asked: int, with_match: int, outside: OtherQueries | None, strangers: str | Path | None) -> str:
    """Of which queries the share of wrong answers is promised."""
    given = 0 if outside is None else len(outside.cosines)
    without = asked - with_match + given
    share = f"{without / (asked + given):.2g} of them" if without else "none of them"
    share = f"{share} without a match in the gallery"
    if given == 0:
        return f"of queries like those calibrated on, {share}"
    whom = "of the classes set aside" if strangers is None else f"like those in {strangers}"
    return f"of queries like those calibrated on and strangers {whom}, {share}"


def _unseen(run: Run, items: Embeddings, labels: tuple[str, ...]) -> UnseenClasses | None:
    """What tells items of classes that the gallery does not hold, from the gallery compared with itself.

    None where nothing could be told, or what is searched for is of another kind than items are: without a class of one
    item, of answers to questions, of fused items, and beyond `UNSEEN` items.
    """
    if run.has_answers or not 2 <= len(items) <= UNSEEN or any(item.is_fused for item in run.gallery.items):
        return None
    keys, order = torch.tensor([label_key(label) for label in labels]).sort()
    if not (keys.unique(return_counts=True)[1] == 1).any():
        return None
    hits = search_flat(items, items, 2)
    is_itself = hits.ids[:, 0] == torch.arange(len(items))  # not where another has the very same embedding
    return UnseenClasses(keys, torch.where(is_itself, hits.scores[:, 1], hits.scores[:, 0])[order].double())


def _outside(
    encoder: Encoder,
    queries: Dataset,
    items: Tensor,
    gallery_labels: Tensor | None,
    progress: bool,
    labels: tuple[str, ...] | None = None,
) -> OtherQueries:
    """What queries without a match find. Of classes set aside the gallery, with these labels, may hold some items: they
    are left out."""
    prediction = encoder.predict(loader_of(queries, EMBEDDING_BATCH), progress=progress)
    mean = prediction.embeddings.mean
    numbers = {} if labels is None else {queries.classes[number]: number for number in queries.labels.unique().tolist()}
    is_foreign = torch.tensor([name not in numbers for name in labels or [""] * len(items)])
    kept = is_foreign.nonzero().flatten()
    if len(kept) == 0:
        raise ValueError("the gallery holds items of the classes set aside alone: index items of known classes")
    searches = search_open_set(mean, items[kept], lambda rows: torch.zeros(len(rows), len(kept)).bool())
    if labels is None and (n_same := int(_find_themselves(mean, items, searches).sum())):
        warnings.warn(
            f"{n_same} of {len(mean)} strangers have the very embedding of an item: what the gallery holds is no "
            "stranger, and a threshold above it accepts nothing; give --strangers that have no match in the gallery",
            stacklevel=3,
        )
    return OtherQueries(
        prediction.embeddings,
        searches.cosines,
        None if gallery_labels is None else gallery_labels[kept[searches.hits]],
        prediction.features,
        None if labels is None else queries.labels,
    )


def _numbers(images: Dataset, relevance: Relevance, known: Dataset) -> Tensor | None:
    """Classes of the queries in the numbering of the data trained on, −1 for others; None where there are none."""
    if images.targets.ndim > 1 or known.targets.ndim > 1:
        return None
    places = {name: number for number, name in enumerate(known.classes)}
    return torch.tensor([places.get(images.classes[label], -1) for label in images.labels[relevance.queries].tolist()])


def _mixture(
    run: Run,
    options: CalibrationOptions,
    columns: Columns | None,
    items: Tensor,
    known: Reference | None,
    n_trained_on: int,
    progress: bool,
) -> OtherQueries | None:
    """What P(known) is learnt from, of queries of which nobody says what they are.

    What is stored or was trained on looks more known than any query to come, and would make strangers of these: it is
    left out. None where nothing is left, or where training items may be that none of the known ones tells.
    """
    source = str(options.unlabelled)
    if source == LIVE:
        embeddings, features = live_queries(run)
    else:
        loader = loader_of(read_items(run.encoder, source, columns, damaged=options.damaged).queries, EMBEDDING_BATCH)
        prediction = run.encoder.predict(loader, progress=progress)
        embeddings, features = prediction.embeddings, prediction.features
    searches = search_open_set(embeddings.mean, items, lambda rows: torch.zeros(len(rows), len(items)).bool())
    is_stored = _find_themselves(embeddings.mean, items, searches)
    is_trained_on = torch.zeros_like(is_stored)
    if known is not None:
        is_trained_on = (knn_distance(features, known, k=1) < _SAME**2 / 2).to(is_stored)
    rest = (~(is_stored | is_trained_on)).nonzero().flatten()
    if len(rest) == len(embeddings):
        return OtherQueries(embeddings, searches.cosines, features=features)
    is_told = known is None or len(known) >= n_trained_on or not is_trained_on.any()
    learnt = f"they are left out, and P(known) is learnt from the other {len(rest)}"
    if not is_told:
        learnt = f"P(known) is not learnt from them, as more may be of {n_trained_on - len(known or ())} others"
    elif len(rest) == 0:
        learnt = "P(known) is not learnt from them"
    warnings.warn(
        f"of {len(embeddings)} unlabelled queries {int(is_stored.sum())} have the very embedding of a stored item and "
        f"{int(is_trained_on.sum())} the features of a training item, which look more known than queries to come: "
        f"{learnt}; give --unlabelled queries that are neither stored nor trained on",
        stacklevel=3,
    )
    if len(rest) == 0 or not is_told:
        return None
    return OtherQueries(embeddings[rest], searches.cosines[rest.cpu()], features=features[rest])


def _splits(run: Path, config: RunConfig) -> Splits:
    config.data.ood = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # which the run said when it read the same data
        splits, _ = load_data(config.data, left_out(run, config.data.root), root_option="or give --data-root DIR")
    if changed := changed_parts(run, splits.parts()):
        raise ValueError(
            f"the data are not those of the run in {run} ({', '.join(changed)} changed): what it was trained on might "
            "be calibrated on; give --data-root, or a --folder of fresh images with --reference 0"
        )
    return splits


def _held_out(encoder: Encoder, options: CalibrationOptions, splits: Splits | None, columns: Columns | None) -> Dataset:
    if options.folder is None and splits is not None:
        return splits.validation
    return read_items(encoder, str(options.folder), columns, labelled=True, damaged=options.damaged)


def _find_themselves(mean: Tensor, items: Tensor, searches: Searches) -> Bool[Tensor, " Q"]:
    """Which queries have the embedding of an item, as in a gallery that was filled with the file that they are of."""
    return (mean.double() - items.double()[searches.nearest]).norm(dim=1) < _SAME


def _search(
    queries: Embeddings, items: Embeddings, relevance: Relevance, seed: int
) -> tuple[Searches, Verifier | None]:
    """What the queries find, and what pairs say, where there are pairs of both kinds."""
    searches = search_open_set(queries.mean, items.mean, relevance.of_rows)
    generator = torch.Generator().manual_seed(seed)
    pairs = draw_pairs(relevance.of_rows, len(queries), len(items), generator=generator)
    if pairs.same.all() or not pairs.same.any():
        return searches, None
    one, other = queries[pairs.queries], items[pairs.items]
    cosine = (one.mean.double() * other.mean.double()).sum(1)
    return searches, Verifier.of(cosine, one.kappa.double(), other.kappa.double(), pairs.same)
