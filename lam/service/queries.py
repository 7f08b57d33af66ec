"""Records of a query, of a search, and of the part of the gallery that it searches."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lam.gallery.gallery import Matching
from lam.gallery.item import Item, content_id, metadata_json, pack
from lam.retrieval.decisions.calibration import Calibration
from lam.service.models import FilterFields
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings


@dataclass(frozen=True)
class Query:
    """An image, a text or an embedding to search for, or to add.

    Attributes:
        features: (1, P) features of the network; None if the client sent an embedding.
        thumbnail: a small picture, if the request needs one.
        text: the part of a text that fits into an input; None for an image.
        text_cut: whether the network read only the beginning of the text.
    """

    embedding: Embeddings
    features: Tensor | None = None
    thumbnail: bytes | None = None
    text: str | None = None
    text_cut: bool = False

    @property
    def kappa(self) -> float:
        """Concentration of the query."""
        return float(self.embedding.kappa[0])

    @property
    def capped(self) -> bool:
        """Whether κ is only a bound, at an end of its range, and not an estimate."""
        return not KAPPA_RANGE[0] < self.kappa < KAPPA_RANGE[1]

    def to_item(self, item_id: str | None, *, label: str, metadata: str, file: bytes | None = None) -> Item:
        """An item from the query, with its text in the metadata.

        By default the id is the `content_id` of the image file, the text or the vector. If metadata and text together
        are too long, the item is refused.
        """
        mean = self.embedding.mean[0].detach().cpu().double()
        vector = (mean / mean.norm()).float().numpy().tobytes()
        if self.text is not None:
            file, metadata = self.text.encode(), metadata_json({**json.loads(metadata), "text": self.text})
        content = content_id(vector if file is None else file)
        item_id = str(content) if item_id is None else item_id
        return Item(item_id, vector, self.kappa, label, metadata, self.thumbnail, contents=pack([content]))


@dataclass(frozen=True, eq=False)
class Part:
    """The part of the gallery that passes a filter.

    `calibration` is for the part; it is None if the part's false accepts have no bound.
    """

    matching: Matching
    calibration: Calibration | None

    @property
    def fields(self) -> FilterFields:
        """The fields of an answer about the filter."""
        calibration = self.calibration
        return FilterFields(
            items=len(self.matching),
            unknown_fields=list(self.matching.unknown),
            far=None if calibration is None else calibration.targets.far,
            queries=0 if calibration is None else calibration.false_accepts.n_units,
        )


@dataclass(frozen=True)
class Search:
    """A search of the gallery.

    Attributes:
        query: a query, or a function that returns it; the search thread calls the function, to save a thread switch.
        min_probability: a match with a lower probability becomes `unknown`.
        without: id of an item to leave out of the hits, if the query is this item.
        part: the part of the gallery to search; None for the whole gallery.
        score_threshold: hits with a lower cosine are left out.
        with_vector: whether hits have their vectors.
        counted: whether the search counts for the promises and for the sample of live queries.
    """

    query: Query | Callable[[], Query]
    k: int
    min_probability: float = 0.0
    without: str | None = None
    part: Part | None = None
    score_threshold: float = -1.0
    with_vector: bool = False
    counted: bool = True

    def read(self) -> Query:
        """The query."""
        return self.query() if callable(self.query) else self.query
