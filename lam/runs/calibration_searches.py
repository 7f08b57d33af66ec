"""The searches of a calibration: labelled queries, strangers and unlabelled queries search one gallery."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool
from torch import Tensor

from lam.datasets import Dataset, Splits
from lam.datasets.texts import Columns
from lam.encoders.base import Prediction
from lam.encoders.batches import HashedBatches
from lam.gallery.embed import read_items
from lam.pairs.relevance import Relevance
from lam.retrieval.decisions.calibrate import OtherQueries
from lam.retrieval.decisions.calibration import Targets
from lam.retrieval.decisions.conformal import ConformalScores, answers_needed, needed
from lam.retrieval.decisions.verification import Verifier, draw_pairs
from lam.retrieval.metrics.open_set import SAME, Searches, is_same, search_open_set, search_without_self
from lam.retrieval.metrics.reference import Reference, knn_distance
from lam.runs import calibration_gallery as galleries
from lam.runs.calibration_options import CalibrationOptions
from lam.runs.config import RunConfig
from lam.runs.data import load_data, loader_of, reference_features
from lam.runs.finished import Run
from lam.runs.folder import changed_parts, left_out
from lam.runs.live import live_queries
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings

LIVE = "live"


class Inputs:
    """A run, the options of its calibration, and the data.

    `config` names the data's folder, even if moved. `splits` is None if options name a folder and `reference` is 0.
    """

    def __init__(self, run: Run, options: CalibrationOptions, progress: bool) -> None:
        self.run, self.options, self.progress = run, options, progress
        self.encoder = run.encoder
        self.config = run.configured([] if options.data_root is None else [f"--data.root={options.data_root}"])
        self.splits: Splits | None = None
        if options.folder is None or options.reference:
            self.splits = _splits(run.folder, self.config)
        self.columns = run.columns(options.columns)

    def held_out(self) -> Dataset:
        """The labelled data for calibration."""
        folder = self.options.folder
        if folder is None and self.splits is not None:
            return self.splits.validation
        return read_items(self.encoder, str(folder), self.columns, labelled=True, damaged=self.options.damaged)

    def queries(self, folder: str | Path) -> Dataset:
        """Queries of a folder or table, without answers."""
        columns = None if self.columns is None else Columns(self.columns.query)
        return read_items(self.encoder, folder, columns, answered=False, damaged=self.options.damaged)

    def predict(self, items: Dataset) -> Prediction:
        """Embeddings and features of items."""
        return self.encoder.predict(loader_of(items), progress=self.progress)


@dataclass(frozen=True)
class Known:
    """Labelled queries, their gallery, and their hits.

    Attributes:
        images: the data that contain the queries.
        gallery: `index` or `held-out`, as in `CalibrationOptions`.
        verifier: distinguishes pairs of one class from other pairs; None if all pairs are of one kind.
        reference: training items, which some scores need; None if these scores are not used.
    """

    images: Dataset
    queries: Prediction
    searchable: galleries.Searchable
    gallery: str
    searches: Searches
    verifier: Verifier | None
    reference: Reference | None

    @property
    def labels(self) -> Tensor | None:
        """(Q,) labels of the queries; None for images of places."""
        images = self.images
        return None if images.targets.ndim > 1 else images.labels[self.searchable.relevance.queries]

    @property
    def gallery_labels(self) -> Tensor | None:
        """(G,) labels of the gallery; None for images of places."""
        labels = self.searchable.relevance.labels_of_hits(torch.arange(len(self.searchable.items))[None])
        return None if labels is None else labels[0]


@dataclass(frozen=True)
class Strangers:
    """Queries without a match, and their hits; None without strangers.

    The hits have classes if there are several. Strangers of held-out classes have labels. `impostors` are the cosines
    of each stranger with one random gallery item.
    """

    found: OtherQueries | None
    labels: tuple[str, ...] | None = None
    impostors: ConformalScores | None = None

    def __len__(self) -> int:
        return 0 if self.found is None else len(self.found.cosines)

    @property
    def n_classes(self) -> int:
        """Number of classes; 0 if every stranger counts for itself."""
        return 0 if self.found is None or self.found.classes is None else len(self.found.classes.unique())

    def can_bound(self, far: float) -> bool:
        """Whether the strangers can bound false accepts at the rate `far`; held-out classes must be numerous enough."""
        return self.found is not None and (self.labels is None or self.n_classes >= needed(far))

    def verifier(self, known: Known, far: float) -> Verifier | None:
        """The verifier of known pairs, with the strangers as impostors if these need a higher threshold for `far`."""
        verifier, ours = known.verifier, self.impostors
        if verifier is None or ours is None or ours.n_units < needed(far):
            return verifier
        theirs = verifier.impostors
        is_enough = theirs.n_units >= needed(far) and theirs.threshold(far) >= ours.threshold(far)
        return verifier if is_enough else replace(verifier, impostors=ours)


def search_known(inputs: Inputs) -> Known:
    """Search the gallery for the labelled queries; warn if queries are training items."""
    run, options, encoder, config = inputs.run, inputs.options, inputs.encoder, inputs.config
    images = inputs.held_out()
    replaces_half, places = False, None
    if options.gallery is None and options.folder is None and inputs.splits is not None:
        places = galleries.stored_places(run, inputs.splits.test)
        replaces_half = places is not None or galleries.holds_none_of(run, images)
    gallery = galleries.HELD_OUT if replaces_half else options.gallery or galleries.INDEX
    if gallery != galleries.HELD_OUT:
        images = images.queries
    _check_attainable(inputs, len(images))
    hashed = HashedBatches(loader_of(images))
    prediction = encoder.predict(hashed, progress=inputs.progress)
    reference = None
    if inputs.splits is not None and options.reference:
        reference = reference_features(encoder, inputs.splits.train, options.reference, seed=config.seed)
    if replaces_half:
        searchable = galleries.stored_items_with_half(
            run.gallery, images, prediction.embeddings, encoder, config, places=places
        )
    elif gallery == galleries.HELD_OUT:
        searchable = galleries.half_of(encoder, images, prediction.embeddings, config)
    else:
        searchable = galleries.stored_items(run.gallery, images)
        if options.folder is None and inputs.splits is not None and not run.has_answers:
            _warn_of_new_classes(images, inputs.splits.train, searchable)
    rows = searchable.relevance.queries
    if seen := hashed.among(encoder.trained_on, rows.tolist()):
        warnings.warn(
            f"the calibration data contain {seen} of the {len(encoder.trained_on)} training items that the encoder "
            "remembers: no bound holds for other items; calibrate on a --folder of items that it was not trained on",
            stacklevel=3,
        )
    queries = prediction.embeddings[rows]
    searches, verifier = _search(queries, searchable.items, searchable.relevance, config.seed)
    found = Prediction(prediction.features[rows], queries)
    return Known(images, found, searchable, gallery, searches, verifier, reference)


def _warn_of_new_classes(images: Dataset, train: Dataset, gallery: galleries.Searchable) -> None:
    trained = train.present_classes & set(gallery.labels or ())
    if trained and not trained & images.present_classes:
        warnings.warn(
            f"the run trained on {len(trained)} classes of the gallery, but on no validation class, so probabilities "
            "do not hold for queries of these classes: calibrate on a --folder of other items",
            stacklevel=4,
        )


def _check_attainable(inputs: Inputs, n_queries: int) -> None:
    """Before the embedding starts, reject a requested rate if the queries are too few to bound it."""
    rates, strangers = inputs.options.rates, inputs.options.strangers
    Targets(**rates)  # raises for a rate outside (0, 1)
    least = {"ood": needed, "wrong": answers_needed}
    if strangers is None and (inputs.splits is None or inputs.splits.strangers is None):
        least["far"] = needed
    for name, needs in least.items():
        rate = rates.get(name)
        if rate is not None and n_queries < needs(rate):
            raise ValueError(
                f"target {name} (--target-{name}): a rate of {rate:g} needs at least {needs(rate)} queries, got "
                f"{n_queries}: give more data, or a greater rate"
            )


def search_strangers(inputs: Inputs, known: Known) -> Strangers:
    """Search the gallery for the strangers of the options, by default the items of held-out classes."""
    if inputs.options.strangers is not None:
        queries = inputs.queries(inputs.options.strangers)
        strangers, is_stored = _search_without_match(inputs, known, queries)
        if n_stored := int(is_stored.sum()):
            warnings.warn(
                f"{n_stored} of {len(queries)} strangers have the same embedding as an item, or its label: items of "
                "the gallery are not strangers, and a threshold above them accepts nothing; give --strangers without a "
                "match there",
                stacklevel=3,
            )
        return strangers
    if inputs.splits is None or inputs.splits.strangers is None:
        return Strangers(None)
    return _search_without_match(inputs, known, inputs.splits.strangers, are_held_out=True)[0]


def _search_without_match(
    inputs: Inputs, known: Known, queries: Dataset, *, are_held_out: bool = False
) -> tuple[Strangers, Bool[Tensor, " O"]]:
    """Hits of strangers (never items of held-out classes); and whether the gallery holds the stranger or its label."""
    prediction = inputs.predict(queries)
    mean, items = prediction.embeddings.mean, known.searchable.items.mean
    own, labels = tuple(queries.classes[number] for number in queries.labels.tolist()), known.searchable.labels or ()
    kept = torch.arange(len(items))
    if are_held_out and labels:
        held_out = set(own)
        kept = torch.tensor([label not in held_out for label in labels]).nonzero().flatten()
    if len(kept) == 0:
        raise ValueError("the gallery holds only items of the held-out classes: index items of known classes")
    searches = _search_unmatched(mean, items[kept])
    classes = queries.labels if are_held_out or len(queries.labels.unique()) > 1 else None
    drawn = torch.randint(len(kept), (len(mean),), generator=torch.Generator().manual_seed(inputs.config.seed))
    impostors = ConformalScores.of((mean.double() * items[kept[drawn]].double()).sum(1), classes)
    found = OtherQueries(
        prediction.embeddings,
        searches.cosines,
        None if known.gallery_labels is None else known.gallery_labels[kept[searches.hits]],
        prediction.features,
        classes,
    )
    stored = set(labels) - {""}
    is_stored = is_same(mean, items[kept][searches.nearest]) | torch.tensor([label in stored for label in own])
    return Strangers(found, own if are_held_out else None, impostors), is_stored


def search_unlabelled(inputs: Inputs, known: Known) -> OtherQueries | None:
    """Search the gallery for the unlabelled queries that are neither stored items nor training items.

    Stored and training items would make P(known) too low for future queries. None if no query remains, or if some
    queries are training items and the reference lacks some training items.
    """
    if inputs.options.unlabelled is None:
        return None
    if str(inputs.options.unlabelled) == LIVE:
        embeddings, features = live_queries(inputs.run)
    else:
        prediction = inputs.predict(inputs.queries(inputs.options.unlabelled))
        embeddings, features = prediction.embeddings, prediction.features
    items, reference = known.searchable.items.mean, known.reference
    searches = _search_unmatched(embeddings.mean, items)
    is_stored = is_same(embeddings.mean, items[searches.nearest])
    is_trained_on = torch.zeros_like(is_stored)
    if reference is not None:
        is_trained_on = (knn_distance(features, reference, k=1) < SAME**2 / 2).to(is_stored)
    rest = (~(is_stored | is_trained_on)).nonzero().flatten()
    if len(rest) == len(embeddings):
        return OtherQueries(embeddings, searches.cosines, features=features)
    n_others = (0 if inputs.splits is None else len(inputs.splits.train)) - len(reference or ())
    may_hide = n_others > 0 and bool(is_trained_on.any())
    outcome = f"they are left out, and P(known) is learned from the other {len(rest)}"
    if may_hide:
        outcome = f"P(known) is not learned, as {n_others} training items outside the reference may be among them, too"
    elif len(rest) == 0:
        outcome = "P(known) is not learned from them"
    warnings.warn(
        f"of {len(embeddings)} unlabelled queries {int(is_stored.sum())} have the embedding of a stored item and "
        f"{int(is_trained_on.sum())} the features of a training item; these look more known than future queries: "
        f"{outcome}; give --unlabelled queries that are neither stored nor trained on",
        stacklevel=3,
    )
    if len(rest) == 0 or may_hide:
        return None
    return OtherQueries(embeddings[rest], searches.cosines[rest.cpu()], features=features[rest])


def _splits(run: Path, config: RunConfig) -> Splits:
    """The splits of a run; a `ValueError` if the data have changed."""
    data = replace(config.data, ood=[], soft_labels=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # the run showed these notes when it read the same data
        splits, _ = load_data(data, left_out(run, data.root), root_option="or give --data-root DIR")
    if changed := changed_parts(run, splits.parts()):
        raise ValueError(
            f"the data of the run in {run} have changed ({', '.join(changed)}), so they may hold training items; give "
            "--data-root, or a --folder of fresh images with --reference 0"
        )
    return splits


def _search_unmatched(queries: Tensor, items: Tensor) -> Searches:
    """Hits of queries that match no item."""
    return search_open_set(queries, items, lambda rows: torch.zeros(len(rows), len(items)).bool())


def _search(
    queries: Embeddings, items: Embeddings, relevance: Relevance, seed: int
) -> tuple[Searches, Verifier | None]:
    """Hits of the queries, and a verifier if there are pairs of one class and pairs of different classes."""
    searches, own = search_without_self(queries.mean, items.mean, relevance.of_rows)
    if not searches.has_mate.any():
        raise ValueError(
            "every match of a query is the query itself: index other items of these labels, or give a --folder of "
            "items that the gallery does not hold"
        )
    generator = torch.Generator().manual_seed(seed)
    pairs = draw_pairs(relevance.of_rows, len(queries), len(items), generator=generator)
    rows, partners, same = (column[pairs[1] != own[pairs[0]]] for column in pairs)
    if same.all() or not same.any():
        return searches, None
    one, other = queries[rows], items[partners]
    cosine = (one.mean.double() * other.mean.double()).sum(1)
    return searches, Verifier.of(cosine, one.kappa.double(), other.kappa.double(), same)
