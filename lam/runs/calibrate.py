"""`lam calibrate`: thresholds and probabilities for the answers of a run.

A run is calibrated on its validation split, never on its test split, or on a folder of fresh images. The validation
split has chosen the epoch and the likelihood scale, so it is only nearly exchangeable with new data; a strict bound
needs a fresh folder.

By default the queries search the run's gallery, also items added while serving. If the gallery holds no match, or the
data have positions instead of labels, one half of the held-out data searches the other half. Searching each item among
all others would need no split. But two items are then often each other's nearest non-match, and count one score twice:
over 200 splits of FashionMNIST, a target of 0.001 gave a rate of 0.0019.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from lam.datasets import Dataset, Splits
from lam.datasets.texts import Columns
from lam.encoders.base import Prediction
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
    Searchable,
    half_of,
    holds_none_of,
    stored_items,
    stored_items_with_half,
)
from lam.runs.calibration_report import bounded_queries, query_mixture
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
"""Greatest number of items in a gallery that is compared with itself, to detect new classes."""
_SAME = 1e-5  # greatest distance between embeddings of one input in batches of different sizes


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of calibrating a run.

    Attributes:
        targets: error rates, all or some by name. A default rate that the data are too few to bound is raised to the
            least possible rate, with a warning.
        flag: score that flags queries, from `lam.retrieval.decisions.flags.FLAGS`; by default the one that separates
            strangers from known queries best in cross-validation.
        accept: score that accepts a match, from `lam.retrieval.decisions.acceptance.ACCEPTS`; by default `probability`,
            unless a single score is better in cross-validation.
        gallery: `index` (default) searches the labelled items of the run's gallery; `held-out` searches one half of the
            held-out data. If a run held out whole classes, its gallery holds no validation class: by default one half
            of the held-out data then replaces as many of its items, with a note.
        folder: fresh images in class sub-folders for calibration, instead of the validation split; for a run on texts
            a table with labels or answers.
        strangers: a folder or table of queries without a match; the bound on false accepts then holds for queries like
            them. By default it holds for the held-out classes of the run, if they are enough for the target, else for
            queries like the labelled ones, after their matches are removed from the gallery. P(known) and the flag
            learn from these strangers, from any number of held-out classes, or from the queries without their classes.
        unlabelled: a folder or table of typical queries, known ones and strangers, from which P(known) is learnt, or
            `live`, the queries that `lam serve --keep-queries` kept. Stored and training items among them are left out,
            with a warning. They are not used if all may be known, or all strangers.
        share_of_strangers: share of future queries without a match, unless unlabelled queries determine it.
        columns: columns of these tables; by default the run's columns, else the usual names.
        data_root: folder of the run's data, if it has moved.
        reference: number of training items that distances compare with; 0 for none.
        damaged: what to do about damaged image files of these folders; by default they are an error.

    Raises:
        ValueError: for a choice or number out of range, or a score that needs a reference without one.
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

    @property
    def rates(self) -> dict[str, float]:
        """The requested error rates by name."""
        return asdict(self.targets) if isinstance(self.targets, Targets) else dict(self.targets)


def repeat_choices(run: str | Path, options: CalibrationOptions) -> CalibrationOptions:
    """Options completed by the rates, flag and score of the run's last calibration.

    A rate `wrong` of 0 removes the last one. Without a reference, a flag that needs one is left out with a warning.
    """
    try:
        previous = Run(run).calibration
    except ValueError:  # from another encoder: not used; from a broken run: calibrating it fails later
        previous = None
    rates, flag, accept = options.rates, options.flag, options.accept
    if previous is not None:
        facts = previous.facts
        rates = {name: getattr(previous.targets, name) for name in facts["asked_rates"]} | rates
        flag, accept = flag or facts["asked_flag"], accept or facts["asked_accept"]
        if options.flag is None and flag is not None and options.reference == 0 and needs_reference(flag):
            flag = None
            warnings.warn(
                f"flag {facts['asked_flag']} compares with training features, but reference is 0: the flag is chosen "
                "anew",
                stacklevel=2,
            )
    if rates.get("wrong") == 0:
        del rates["wrong"]
    return replace(options, targets=rates, flag=flag, accept=accept)


def calibrate_run(run: str | Path, options: CalibrationOptions | None = None, *, progress: bool = True) -> Calibration:
    """Calibrate a finished run and save the result in its folder.

    Args:
        run: the run's folder.
        options: options of the calibration; None for the defaults.
        progress: show a progress bar on standard error.

    Returns:
        The saved calibration.

    Raises:
        ValueError: for a folder that is no finished run, changed data, too few data to bound a target rate (with the
            number needed), a flag without its features, damaged files, or a gallery without a match of any query.
        CorruptFileError: naming a file of the run that is missing, truncated or altered.
    """
    inputs = _Inputs(Run(run), CalibrationOptions() if options is None else options, progress)
    known = _search_known(inputs)
    strangers = _search_strangers(inputs, known)
    targets = _attainable_targets(inputs.options, known, strangers)
    mixture = _search_unlabelled(inputs, known)
    options, gallery = inputs.options, known.searchable
    is_whole = gallery.is_stored and not gallery.without_label
    with inputs.run.lock():
        data = CalibrationData(
            known.searches,
            known.queries.embeddings,
            features=known.queries.features,
            classes=None if inputs.splits is None else _classes(known, inputs.splits.train),
            gallery_labels=known.gallery_labels,
            reference=known.reference,
            strangers=strangers.found,
            mixture=mixture,
        )
        calibration = calibrate(
            data,
            Choices(
                targets,
                options.flag,
                options.accept,
                of_strangers=strangers.can_bound(targets.far),
                share=options.share_of_strangers,
            ),
            key=inputs.run.fingerprint,
            verifier=known.verifier,
            unseen=_unseen(inputs.run, gallery) if is_whole else None,
            facts=_facts(inputs, known, strangers, mixture, targets),
        )
        _warn_of_constant_flag(calibration)
        save_calibration(inputs.run.folder, calibration)
        plot_reliability(
            inputs.run.folder / "plots" / "probability.png",
            calibration.reliability,
            confidence="P(the first hit is right, if the gallery holds a match)",
        )
    return calibration


class _Inputs:
    """A run, the options of its calibration, and their data.

    Attributes:
        config: configuration of the run, with the present folder of its data.
        splits: splits of the run; None with fresh images and no reference.
        columns: columns of tables of texts.
    """

    def __init__(self, run: Run, options: CalibrationOptions, progress: bool) -> None:
        self.run, self.options, self.progress = run, options, progress
        self.encoder = run.encoder
        self.config = run.configured([] if options.data_root is None else [f"--data.root={options.data_root}"])
        self.splits: Splits | None = None
        if options.folder is None or options.reference:
            self.splits = _splits(run.folder, self.config)
        self.columns = columns_of(run, options.columns)

    def held_out(self) -> Dataset:
        """The labelled data for calibration."""
        folder = self.options.folder
        if folder is None and self.splits is not None:
            return self.splits.validation
        return read_items(self.encoder, str(folder), self.columns, labelled=True, damaged=self.options.damaged)

    def queries(self, folder: str | Path) -> Dataset:
        """Queries of a folder or table, without answers."""
        columns = None if self.columns is None else Columns(self.columns.query)
        return read_items(self.encoder, folder, columns, damaged=self.options.damaged).queries

    def predict(self, items: Dataset) -> Prediction:
        """Embeddings and features of items."""
        return self.encoder.predict(loader_of(items, EMBEDDING_BATCH), progress=self.progress)


@dataclass(frozen=True)
class _Known:
    """Labelled queries and their hits.

    Attributes:
        images: the data that contain the queries.
        queries: embeddings and features of the queries.
        searchable: the gallery, and its items that match.
        gallery: its name among the options.
        searches: hits of the queries.
        verifier: a verifier of pairs; None without pairs of one class and of different classes.
        reference: training items that distances compare with.
    """

    images: Dataset
    queries: Prediction
    searchable: Searchable
    gallery: str
    searches: Searches
    verifier: Verifier | None
    reference: Reference | None

    @property
    def gallery_labels(self) -> Tensor | None:
        """(G,) labels of the gallery; None for positions."""
        labels = self.searchable.relevance.labels_of_hits(torch.arange(len(self.searchable.items))[None])
        return None if labels is None else labels[0]


@dataclass(frozen=True)
class _Strangers:
    """Queries without a match, and their hits.

    Attributes:
        found: their hits; None without strangers.
        n_classes: number of held-out classes of the run among them; 0 for strangers from a folder.
    """

    found: OtherQueries | None
    n_classes: int = 0

    def __len__(self) -> int:
        return 0 if self.found is None else len(self.found.cosines)

    def can_bound(self, far: float) -> bool:
        """Whether they bound false accepts at this rate; items of a class are alike, so held-out classes count."""
        return self.found is not None and (self.n_classes == 0 or self.n_classes >= needed(far))


def _search_known(inputs: _Inputs) -> _Known:
    """Search the gallery for the labelled queries; warn of training items and of queries that find themselves."""
    run, options, encoder, config = inputs.run, inputs.options, inputs.encoder, inputs.config
    images = inputs.held_out()
    replaces_half = options.gallery is None and options.folder is None and holds_none_of(run, images)
    gallery = HELD_OUT if replaces_half else options.gallery or INDEX
    if gallery != HELD_OUT:
        images = images.queries
    hashed = HashedBatches(loader_of(images, EMBEDDING_BATCH))
    prediction = encoder.predict(hashed, progress=inputs.progress)
    reference = None
    if inputs.splits is not None and options.reference:
        reference = reference_features(encoder, inputs.splits.train, options.reference, seed=config.seed)
    if replaces_half:
        searchable = stored_items_with_half(run.gallery, images, prediction.embeddings, config.seed)
    elif gallery == HELD_OUT:
        searchable = half_of(encoder, images, prediction.embeddings, config)
    else:
        searchable = stored_items(run.gallery, images)
    rows = searchable.relevance.queries
    if seen := hashed.among(encoder.trained_on, rows.tolist()):
        warnings.warn(
            f"the calibration data contain {seen} of the {len(encoder.trained_on)} training items that the encoder "
            "remembers: no bound holds for other items; calibrate on a --folder of items that it was not trained on",
            stacklevel=3,
        )
    queries = prediction.embeddings[rows]
    searches, verifier = _search(queries, searchable.items, searchable.relevance, config.seed)
    is_item = _find_themselves(queries.mean, searchable.items.mean, searches)
    if n_same := int((searches.correct & is_item).sum()):
        warnings.warn(
            f"{n_same} of {len(searches)} queries have the same embedding as an item: no bound holds if the gallery "
            "contains the queries themselves; calibrate on a --folder of other items",
            stacklevel=3,
        )
    found = Prediction(prediction.features[rows], queries)
    return _Known(images, found, searchable, gallery, searches, verifier, reference)


def _search_strangers(inputs: _Inputs, known: _Known) -> _Strangers:
    """Search the gallery for the strangers of a folder, else for the held-out classes of the run."""
    if inputs.options.strangers is not None:
        queries = inputs.queries(inputs.options.strangers)
        found, is_itself = _search_without_match(inputs, known, queries)
        if n_same := int(is_itself.sum()):
            warnings.warn(
                f"{n_same} of {len(queries)} strangers have the same embedding as an item: items of the gallery are no "
                "strangers, and a threshold above them accepts nothing; give --strangers without a match there",
                stacklevel=3,
            )
        return _Strangers(found)
    if inputs.splits is None or inputs.splits.strangers is None:
        return _Strangers(None)
    queries = inputs.splits.strangers
    found, _ = _search_without_match(inputs, known, queries, are_held_out=True)
    return _Strangers(found, len(queries.labels.unique()))


def _search_without_match(
    inputs: _Inputs, known: _Known, queries: Dataset, *, are_held_out: bool = False
) -> tuple[OtherQueries, Bool[Tensor, " O"]]:
    """Hits of strangers, and which strangers find themselves.

    Args:
        queries: the strangers.
        are_held_out: whether they are held-out classes of the run. Their classes are then known: items added to the
            gallery under their labels are left out.
    """
    prediction = inputs.predict(queries)
    mean, items = prediction.embeddings.mean, known.searchable.items.mean
    kept = torch.arange(len(items))
    if are_held_out and (labels := known.searchable.labels) is not None:
        classes = {queries.classes[number] for number in queries.labels.unique().tolist()}
        kept = torch.tensor([label not in classes for label in labels]).nonzero().flatten()
    if len(kept) == 0:
        raise ValueError("the gallery holds only items of the held-out classes: index items of known classes")
    searches = search_open_set(mean, items[kept], lambda rows: torch.zeros(len(rows), len(kept)).bool())
    found = OtherQueries(
        prediction.embeddings,
        searches.cosines,
        None if known.gallery_labels is None else known.gallery_labels[kept[searches.hits]],
        prediction.features,
        queries.labels if are_held_out else None,
    )
    return found, _find_themselves(mean, items[kept], searches)


def _search_unlabelled(inputs: _Inputs, known: _Known) -> OtherQueries | None:
    """Search the gallery for unlabelled queries; stored items and training items are left out.

    These look more known than any future query: with them, future queries would look like strangers. None if no
    unlabelled query is given or left, or if the reference is too small to find the training items.
    """
    if inputs.options.unlabelled is None:
        return None
    if str(inputs.options.unlabelled) == LIVE:
        embeddings, features = live_queries(inputs.run)
    else:
        prediction = inputs.predict(inputs.queries(inputs.options.unlabelled))
        embeddings, features = prediction.embeddings, prediction.features
    items, reference = known.searchable.items.mean, known.reference
    searches = search_open_set(embeddings.mean, items, lambda rows: torch.zeros(len(rows), len(items)).bool())
    is_stored = _find_themselves(embeddings.mean, items, searches)
    is_trained_on = torch.zeros_like(is_stored)
    if reference is not None:
        is_trained_on = (knn_distance(features, reference, k=1) < _SAME**2 / 2).to(is_stored)
    rest = (~(is_stored | is_trained_on)).nonzero().flatten()
    if len(rest) == len(embeddings):
        return OtherQueries(embeddings, searches.cosines, features=features)
    n_others = (0 if inputs.splits is None else len(inputs.splits.train)) - len(reference or ())
    may_hide = reference is not None and n_others > 0 and bool(is_trained_on.any())
    outcome = f"they are left out, and P(known) is learnt from the other {len(rest)}"
    if may_hide:
        outcome = f"P(known) is not learnt from them, because more may be among {n_others} other training items"
    elif len(rest) == 0:
        outcome = "P(known) is not learnt from them"
    warnings.warn(
        f"of {len(embeddings)} unlabelled queries {int(is_stored.sum())} have the embedding of a stored item and "
        f"{int(is_trained_on.sum())} the features of a training item; these look more known than future queries: "
        f"{outcome}; give --unlabelled queries that are neither stored nor trained on",
        stacklevel=3,
    )
    if len(rest) == 0 or may_hide:
        return None
    return OtherQueries(embeddings[rest], searches.cosines[rest.cpu()], features=features[rest])


def _attainable_targets(options: CalibrationOptions, known: _Known, strangers: _Strangers) -> Targets:
    """The targets; default rates are raised to the least rate that the number of calibration scores can bound."""
    asked = options.rates
    targets = Targets(**asked)
    n_without_match = int(known.searches.non_mated.isfinite().sum())
    counts = {"far": n_without_match if options.strangers is None else len(strangers), "ood": len(known.searches)}
    few = {name: n for name, n in counts.items() if name not in asked and 0 < n < needed(getattr(targets, name))}
    least = {name: least_rate(n) for name, n in few.items()}
    if few:
        usual = {name: getattr(targets, name) for name in few}
        raised = ", ".join(
            f"{name} to {least[name]:g} ({usual[name]:g} needs {needed(usual[name])} scores, there are {n})"
            for name, n in few.items()
        )
        choice = " or ".join(f"--target-{name}" for name in few)
        warnings.warn(
            f"few calibration data raise the promised rates: {raised}; give more data, or choose a rate with {choice}",
            stacklevel=3,
        )
    return replace(targets, **least)


def _facts(
    inputs: _Inputs, known: _Known, strangers: _Strangers, mixture: OtherQueries | None, targets: Targets
) -> dict[str, Any]:
    """Facts for readers: the data of a calibration, and the queries for which its bounds hold."""
    options, run = inputs.options, inputs.run
    right = known.searches.correct[known.searches.has_mate]
    paths = {name: getattr(options, name) for name in ("folder", "strangers", "unlabelled")}
    paths = {name: None if path is None else str(path) for name, path in paths.items()}
    n_queries = len(known.searches)
    return {
        "data": paths["folder"] or VALIDATION,
        "asked_flag": options.flag,
        "asked_accept": options.accept,
        "asked_rates": sorted(options.rates),
        "gallery": known.gallery,
        "strangers": paths["strangers"],
        "false_accepts": bounded_queries(
            "questions" if run.has_answers else run.gallery_kind,
            folder=paths["folder"],
            strangers=paths["strangers"],
            is_trained=run.config.network.head == "train",
            n_classes=strangers.n_classes,
            far=targets.far,
        ),
        "answers_wrong": None
        if targets.wrong is None
        else query_mixture(n_queries, n_queries - len(right), len(strangers), paths["strangers"]),
        "without_label": known.searchable.without_label,
        "unlabelled": paths["unlabelled"],
        "n_unlabelled": 0 if mixture is None else len(mixture.cosines),
        "n_strangers": len(strangers),
        "queries": n_queries,
        "queries_with_match": len(right),
        "first_hit_right": float(right.double().mean()),
    }


def _unseen(run: Run, gallery: Searchable) -> UnseenClasses | None:
    """The detector of new classes, from the gallery compared with itself.

    None if no class has one item, beyond `UNSEEN` items, or for answers and fused items, which differ from queries.
    """
    items = gallery.items
    if run.has_answers or not 2 <= len(items) <= UNSEEN or any(item.is_fused for item in run.gallery.items):
        return None
    keys, order = torch.tensor([label_key(label) for label in gallery.labels or ()]).sort()
    if not (keys.unique(return_counts=True)[1] == 1).any():
        return None
    hits = search_flat(items, items, 2)
    is_itself = hits.ids[:, 0] == torch.arange(len(items))  # False if another item has the same embedding
    return UnseenClasses(keys, torch.where(is_itself, hits.scores[:, 1], hits.scores[:, 0])[order].double())


def _classes(known: _Known, train: Dataset) -> Tensor | None:
    """(Q,) classes of the queries, numbered as in the training data, −1 for other classes; None for positions."""
    images = known.images
    if images.targets.ndim > 1 or train.targets.ndim > 1:
        return None
    numbers = {name: number for number, name in enumerate(train.classes)}
    labels = images.labels[known.searchable.relevance.queries].tolist()
    return torch.tensor([numbers.get(images.classes[label], -1) for label in labels])


def _splits(run: Path, config: RunConfig) -> Splits:
    """The splits of a run; a `ValueError` if they have changed."""
    config.data.ood = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # the run showed these notes when it read the same data
        splits, _ = load_data(config.data, left_out(run, config.data.root), root_option="or give --data-root DIR")
    if changed := changed_parts(run, splits.parts()):
        raise ValueError(
            f"the data of the run in {run} have changed ({', '.join(changed)}), so they may hold training items; give "
            "--data-root, or a --folder of fresh images with --reference 0"
        )
    return splits


def _find_themselves(mean: Tensor, items: Tensor, searches: Searches) -> Bool[Tensor, " Q"]:
    """Which queries have the same embedding as an item, because the gallery holds the same file."""
    return (mean.double() - items.double()[searches.nearest]).norm(dim=1) < _SAME


def _search(
    queries: Embeddings, items: Embeddings, relevance: Relevance, seed: int
) -> tuple[Searches, Verifier | None]:
    """Hits of the queries, and a verifier if there are pairs of one class and of different classes."""
    searches = search_open_set(queries.mean, items.mean, relevance.of_rows)
    generator = torch.Generator().manual_seed(seed)
    pairs = draw_pairs(relevance.of_rows, len(queries), len(items), generator=generator)
    if pairs.same.all() or not pairs.same.any():
        return searches, None
    one, other = queries[pairs.queries], items[pairs.items]
    cosine = (one.mean.double() * other.mean.double()).sum(1)
    return searches, Verifier.of(cosine, one.kappa.double(), other.kappa.double(), pairs.same)


def _warn_of_constant_flag(calibration: Calibration) -> None:
    scores = calibration.detector.conformal_scores(calibration.flag).scores
    if len(scores) > 1 and scores[0] == scores[-1]:
        warnings.warn(
            f"{calibration.flag} is {float(scores[0]):.6g} for all {len(scores)} calibration queries, like votes if "
            "every item has its own label: it separates no queries; flag by another score",
            stacklevel=3,
        )
