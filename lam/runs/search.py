"""`lam search`: search a run's gallery, decide on the answers, and write them as CSV or JSON."""

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets.folder import image_files
from lam.datasets.texts import Columns, Texts
from lam.encoders.base import Prediction
from lam.gallery.decide import PValues, decide
from lam.gallery.embed import BATCH, DamagedFiles, ImageBatches, is_cut, preprocessing_of, read_items
from lam.gallery.item import Item
from lam.gallery.local_index import require_faiss
from lam.inputs import Preprocessing, TextPreprocessing
from lam.retrieval import N_HITS, Calibration, Hits
from lam.retrieval.decisions.abstention import SearchDecisions
from lam.runs.calibration_report import answer_in_words
from lam.runs.finished import Run
from lam.utils.checks import check_at_least
from lam.utils.files import write_csv, write_json
from lam.vmf.embeddings import Embeddings

_SHOWN = 40
SUFFIXES = (".csv", ".json")
_OF_DECISION = ("probability", "p_known", "right_if_known", "statistic", "accept_above", "false_accept", "p_value")
_RENAMED = {"p_known": "known"}  # `p_known` is a column of the encoder
_UNSEEN = ("p_new", "p_in_gallery")
_OF_IMAGE: tuple[str, ...] = (
    *("image", "kappa", "variance", "decision", *(_RENAMED.get(name, name) for name in _OF_DECISION)),
    *("accept", "flagged_by", *_UNSEEN),
)
_OF_HIT: tuple[str, ...] = ("rank", "score", "hit_kappa", "id", "label", "path", "text", "uncertain", "fused")


@dataclass(frozen=True)
class SearchResult:
    """The answers to Q images (files) or texts.

    Attributes:
        queries: embeddings of the queries.
        hits, items: the nearest items of each query, without thumbnails.
        decisions: the decisions; None without a calibration.
        doubts: words that say why each query is uncertain; empty if the encoder has not learned its ambiguity.
        unseen: p-values of "the class is new" and "the class is in the gallery", if the calibration has them; see
            `Calibration.unseen_p_values`.
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
        """Whether an image of the item has a κ below the calibration's threshold on κ; None without a calibration."""
        return None if self.calibration is None else item.least_kappa < self.calibration.kappa_below

    def intervals(self, row: int) -> list[list[float]] | None:
        """Ends of the interval for the cosine of each hit of a query; None if the calibration has no intervals."""
        intervals = None if self.calibration is None else self.calibration.intervals
        if intervals is None:
            return None
        return intervals(self.hits.scores[row : row + 1], self.queries.kappa[row : row + 1])[0].tolist()

    def decision_in_words(self, row: int) -> list[str]:
        """Lines with the evidence for a decision; they name the event and condition of each probability."""
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
            lines.append("  speaks against it, if the gallery is a random sample of incoming items")
        return lines

    def _flag_in_words(self, decisions: SearchDecisions, calibration: Calibration, row: int) -> str:
        """A line on the flag of a query; empty if the calibration's own flag judged the query and let it pass."""
        by, flag = decisions.flagged_by[row], calibration.flag
        why = "not all hits have a label" if self.items[row] else "nothing was found"
        words = by if by == flag else f"{by} instead of {flag}, because {why}"
        if decisions.decision[row] == "abstain":
            return f"flagged by {words}: a share {float(decisions.p_value[row]):.2g} of known queries is as unusual"
        return "" if by == flag else f"judged by {words}"


def search(run: str | Path, *images: str | Path, texts: Sequence[str] = (), k: int = 5) -> SearchResult:
    """Search a run's gallery for images or for texts.

    Args:
        images: files, and folders of images.
        texts: texts instead of images, for a run on texts; a warning names texts that the network does not read whole.
        k: number of hits, at least 1.

    Raises:
        ValueError: for k below 1, neither or both of images and texts, damaged files, or an empty text.
    """
    searcher = _Searcher(run, k)
    asked, batches = searcher.inputs(images, texts, DamagedFiles())
    return searcher.answer(asked, Prediction.concatenate(list(searcher.predictions(batches))))


def search_in_batches(
    run: str | Path,
    *images: str | Path,
    texts: Sequence[str] | Path = (),
    columns: Columns | None = None,
    k: int = 5,
    damaged: DamagedFiles | None = None,
    progress: bool = False,
) -> Iterator[SearchResult]:
    """Search for images or texts as `search` does, in batches; yield the result of each batch.

    Args:
        texts: as for `search`, or a table; see `lam.utils.tables.Table.read`.
        columns: columns of that table; by default the run's column, or a column called text or question.
        damaged: treatment of damaged image files; by default an error after the last batch.
    """
    searcher = _Searcher(run, k, columns)
    damaged = DamagedFiles() if damaged is None else damaged
    asked, batches = searcher.inputs(images, texts, damaged)
    n_done = 0
    for prediction in searcher.predictions(batches, progress=progress):
        n_done += (size := len(prediction.embeddings))
        yield searcher.answer(asked[n_done - size : n_done], prediction)


class _Searcher:
    """Searches a run's gallery for the k hits of each query."""

    def __init__(self, run: str | Path, k: int, columns: Columns | None = None) -> None:
        check_at_least("k", k, 1)
        opened = Run(run)
        require_faiss()
        self._encoder, self._gallery, self._calibration = opened.encoder, opened.gallery, opened.calibration
        self._columns, self._k = opened.columns(columns), k

    def inputs(
        self, images: Sequence[str | Path], texts: Sequence[str] | Path, damaged: DamagedFiles
    ) -> tuple[Sequence[Path | str], Iterable[Tensor]]:
        """The queries, and batches of inputs; reading a batch appends its images to the queries."""
        if isinstance(texts, str):
            raise ValueError(f"texts must be a list, got the text {texts!r}: give [text]")
        folders = (image_files(path) if path.is_dir() else [path] for path in map(Path, images))
        files = [file for folder in folders for file in folder]
        if not files and images:
            raise ValueError(f"there are no images in {', '.join(map(str, images))}")
        if bool(files) == bool(texts):
            got = "both" if files else "neither"
            raise ValueError(f"give either images (files or folders) or texts to search for, got {got}")
        if files:
            batches = ImageBatches(files, preprocessing_of(self._encoder, Preprocessing), damaged, goes_on=True)
            return batches.read, batches
        preprocessing = preprocessing_of(self._encoder, TextPreprocessing)
        if isinstance(texts, Path):
            columns = None if self._columns is None else Columns(self._columns.query)
            items = read_items(self._encoder, texts, columns, answered=False, damaged=damaged)
            texts = items.texts if isinstance(items, Texts) else ()
        else:
            for text in texts:
                if is_cut(self._encoder.network, preprocessing, text):
                    warnings.warn(f"{text[:_SHOWN]!r}... is longer than the network reads: it was cut", stacklevel=4)
        return texts, torch.stack([preprocessing(text) for text in texts]).split(BATCH)

    def predictions(self, batches: Iterable[Tensor], *, progress: bool = False) -> Iterator[Prediction]:
        n_samples = self._gallery.mean_samples
        return self._encoder.predict_batches(batches, n_samples=n_samples, progress=progress)

    def answer(self, asked: Sequence[Path | str], prediction: Prediction) -> SearchResult:
        gallery, calibration, queries = self._gallery, self._calibration, prediction.embeddings
        decisions, unseen = None, list[PValues]([None] * len(asked))
        hits = gallery.search(queries, self._k if calibration is None else max(self._k, N_HITS))
        if calibration is not None:
            labels = [[gallery.items[place].label for place in row] for row in hits.ids.tolist()]
            decisions, unseen = decide(
                calibration, queries, prediction.features, hits, labels, gallery_size=len(gallery)
            )
        hits = hits[:, : self._k]
        items = tuple(tuple(gallery.items[place] for place in row) for row in hits.ids.tolist())
        doubts = () if self._encoder.ambiguity is None else tuple(self._encoder.ambiguity.doubts(queries))
        return SearchResult(tuple(asked), queries, hits, items, decisions, doubts, calibration, tuple(unseen))


def check_file(path: str | Path, source: str | Path | None = None) -> None:
    """Reject a file with another suffix, and the table `source` that the search reads."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"the result of a search can be written as {' or '.join(SUFFIXES)}, got {path}")
    if source is not None and Path(path).resolve() == Path(source).resolve():
        raise ValueError(f"{path} holds the queries and would be overwritten: give another --output")


def write_results(path: str | Path, results: Sequence[SearchResult]) -> None:
    """Write the results of searches atomically: images (or texts) in their order, hits best first.

    Each image has a `decision` and its evidence. `known` is P(the gallery holds a match), `right_if_known` is P(the
    first hit is right, if the gallery holds a match), and `probability` is their product. `accept` names the deciding
    score, `statistic` is its value, and `accept_above` its threshold. `false_accept` is the share of searches without a
    match whose first hit looks at least as good. `p_value` is the share of known queries that are as unusual by the
    score `flagged_by`. `p_new` and `p_in_gallery` are p-values of `lam.retrieval.decisions.unseen_classes`. Without a
    calibration, these fields and `uncertain` are null (empty in CSV). CSV leaves out nested values, and has one line
    for an image without hits.
    """
    check_file(path)
    decisions, queries = results[0].decisions, results[0].queries
    state = None if decisions is None else "stale" if decisions.stale else "current"
    entries = [entry for result in results for entry in _entries(result)]
    if Path(path).suffix.lower() == ".json":
        write_json(path, {"calibration": state, "images": entries})
        return
    parts = (*queries.parts(), "doubt") if queries.has_parts else ()
    columns = (*_OF_IMAGE, "calibration", *parts, *_OF_HIT)
    rows = ({**entry, "calibration": state, **hit} for entry in entries for hit in entry["hits"] or [{}])
    write_csv(path, columns, rows)


def _entries(result: SearchResult) -> Iterator[dict[str, Any]]:
    queries = result.queries
    decisions = result.decisions
    for row, image in enumerate(result.images):
        numbers = {"kappa": float(queries.kappa[row]), "variance": float(queries.variance[row])}
        entry = dict.fromkeys(_OF_IMAGE) | {"image": str(image), **numbers}
        if decisions is not None:
            numbers = {_RENAMED.get(name, name): float(getattr(decisions, name)[row]) for name in _OF_DECISION}
            entry |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            for name in ("decision", "accept", "flagged_by"):
                entry[name] = getattr(decisions, name)[row]
            entry |= zip(_UNSEEN, result.unseen[row] or (None, None), strict=True)
        if queries.has_parts:
            entry |= {name: float(values[row]) for name, values in queries.parts().items()}
            entry["doubt"] = result.doubts[row]
        hits = zip(result.hits.scores[row].tolist(), result.hits.kappa[row].tolist(), result.items[row], strict=True)
        entry["hits"] = [
            {
                "rank": rank,
                "score": score,
                "hit_kappa": kappa,
                "id": item.id,
                "label": item.label,
                "path": item.path,
                "text": item.text,
                "paths": json.loads(item.paths),
                "metadata": json.loads(item.metadata),
                "images": item.images,
                "fused": item.is_fused,
                "resultant": item.resultant,
                "least_kappa": item.least_kappa,
                "uncertain": result.is_uncertain(item),
            }
            for rank, (score, kappa, item) in enumerate(hits, start=1)
        ]
        yield entry
