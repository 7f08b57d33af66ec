"""LangChain: embeddings of a lam encoder, a vector store with probabilities as relevance scores, and a retriever."""

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.encoders.base import Encoder
from lam.integrations.judging import Judgement, OnUnknown, fields_of, judge_each, label_of, predict_texts, text_encoder
from lam.retrieval.decisions.calibration import Calibration
from lam.runs.finished import Run
from lam.utils.checks import check_at_least, unit_rows
from lam.utils.extras import needs_extra

with needs_extra("langchain", "the adapter of LangChain"):
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import run_in_executor
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance
    from pydantic import ConfigDict

Filter = Callable[[Document], bool] | None


class LamEmbeddings(Embeddings):
    """Mean directions of a lam encoder of texts; `n_samples` as in `Encoder.embed`."""

    def __init__(self, encoder: Encoder, *, n_samples: int | None = None) -> None:
        self.encoder, self.n_samples = text_encoder(encoder), n_samples

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return predict_texts(self.encoder, texts, n_samples=self.n_samples).embeddings.mean.tolist() if texts else []

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class LamVectorStore(VectorStore):
    """Documents in memory, searched exactly by cosine. Relevance scores are P(right), see `lam.integrations.judging`.

    Args:
        embedding: `LamEmbeddings`; with other embeddings, the store gives no probabilities.
        calibration: calibration of the encoder on a gallery like this store; None for a store without probabilities.
        label: the metadata field with a document's label; a document without this field has a label of its own.
    """

    def __init__(self, embedding: Embeddings, calibration: Calibration | None = None, *, label: str = "label") -> None:
        self._embedding, self._calibration, self._label = embedding, calibration, label
        self._rows: dict[str, tuple[Document, Tensor]] = {}  # threads may search the rows before or after a change
        self._stacked: tuple[object, Tensor] = None, torch.empty(0)
        self._changing = threading.Lock()

    @classmethod
    def from_run(cls, folder: str | Path) -> "LamVectorStore":
        """The gallery of a run on texts, with its encoder and calibration. Changes stay in memory."""
        run = Run(folder)
        gallery, calibration = run.gallery, run.calibration
        store = cls(LamEmbeddings(run.encoder, n_samples=gallery.mean_samples), calibration)
        items = gallery.items
        documents = [Document(id=item.id, page_content=item.text or "", metadata=fields_of(item)) for item in items]
        if documents:
            store._put(documents, gallery.embeddings.mean)
        return store

    @classmethod
    def from_texts(cls, texts: list[str], embedding: Embeddings, metadatas: Any = None, **options: Any) -> Any:
        ids = options.pop("ids", None)
        store = cls(embedding, **options)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    def add_texts(self, texts: Iterable[str], metadatas: Any = None, *, ids: Any = None, **kwargs: Any) -> list[str]:
        """Add documents, and return their ids; by default ids are new. A document replaces an older one with its id."""
        texts = _list_of("texts", texts)
        metadatas = _list_of("metadatas", metadatas or ()) or [{}] * len(texts)
        ids = _list_of("ids", ids or ()) or [None] * len(texts)
        if not len(texts) == len(metadatas) == len(ids):
            raise ValueError(f"give one metadata and id a text, got {len(metadatas)} and {len(ids)} for {len(texts)}")
        names = [str(uuid.uuid4()) if name in (None, "") else str(name) for name in ids]
        rows = zip(names, texts, metadatas, strict=True)
        documents = [Document(id=name, page_content=text, metadata=dict(fields or {})) for name, text, fields in rows]
        if texts:
            self._put(documents, torch.tensor(self._embedding.embed_documents(texts)))
        return [str(document.id) for document in documents]

    def _put(self, documents: Sequence[Document], vectors: Float[Tensor, "N D"]) -> None:
        unit = unit_rows("embeddings", vectors).float()
        with self._changing:
            width = next((len(row) for _, row in self._rows.values()), unit.shape[1])
            if width != unit.shape[1]:
                raise ValueError(f"embeddings must have the dimension of the others, {width}, got {unit.shape[1]}")
            rows = zip(documents, unit, strict=True)
            self._rows = self._rows | {str(document.id): (document, row) for document, row in rows}

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        gone = None if ids is None else {str(name) for name in _list_of("ids", ids)}
        with self._changing:
            self._rows = {} if gone is None else {name: row for name, row in self._rows.items() if name not in gone}
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        rows = self._rows
        return [rows[name][0] for name in map(str, _list_of("ids", ids)) if name in rows]

    def _rank(
        self, query: Float[Tensor, " D"], keep: Filter
    ) -> tuple[list[Document], Float[Tensor, " N"], Float[Tensor, "N D"]]:
        """The documents that pass the filter, by falling cosine, with cosines and unit vectors."""
        if keep is not None and not callable(keep):
            example = "lambda document: document.metadata['label'] == 'a'"
            raise TypeError(f"a filter must be a function, such as {example}, got {keep!r}")
        rows, (of, vectors) = self._rows, self._stacked
        if of is not rows or not rows:
            vectors = torch.stack([row for _, row in rows.values()]) if rows else torch.empty(0, len(query))
            self._stacked = rows, vectors
        if len(query) != vectors.shape[1]:
            raise ValueError(
                f"the query must have the dimension of the documents, {vectors.shape[1]}, got {len(query)}"
            )
        documents = [document for document, _ in rows.values()]
        kept = [place for place, document in enumerate(documents) if keep is None or keep(document)]
        cosines = (vectors[kept] @ unit_rows("query", query[None])[0].float()).clamp(-1, 1)
        cosines, order = cosines.sort(descending=True, stable=True)
        places = [kept[place] for place in order.tolist()]
        return [documents[place] for place in places], cosines, vectors[places]

    def similarity_search_with_score(self, query: str, k: int = 4, *, filter: Filter = None) -> Any:
        """The nearest documents that pass the filter, with their cosines."""
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, filter=filter)

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, *, filter: Filter = None
    ) -> list[tuple[Document, float]]:
        """The documents that pass the filter and are nearest to an embedding, with their cosines."""
        check_at_least("k", k, 1)
        documents, cosines, _ = self._rank(torch.tensor(embedding), filter)
        return list(zip(documents[:k], cosines[:k].tolist(), strict=True))

    def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **options)]

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **options: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, **options)]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **options: Any
    ) -> list[Document]:
        embedding = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(embedding, k, fetch_k, lambda_mult, **options)

    def max_marginal_relevance_search_by_vector(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Filter = None,
    ) -> list[Document]:
        vector = torch.tensor(embedding)
        documents, _, vectors = self._rank(vector, filter)
        chosen = maximal_marginal_relevance(vector.numpy(), vectors[:fetch_k].tolist(), lambda_mult, k)
        return [documents[place] for place in chosen]

    def judge(self, query: str, k: int = 4, *, filter: Filter = None) -> tuple[Judgement, list[Document]]:
        """A `Judgement` (the decision, and P(right) of the k nearest documents), and these documents."""
        embedding = self._embedding
        if self._calibration is None or not isinstance(embedding, LamEmbeddings):
            raise ValueError(
                "P(right) needs LamEmbeddings and a calibration: run `lam calibrate` and open the run by "
                "LamVectorStore.from_run, or ask for cosines by similarity_search_with_score"
            )
        asked = predict_texts(embedding.encoder, [query], n_samples=embedding.n_samples)
        documents, cosines, _ = self._rank(asked.embeddings.mean[0], filter)
        labels = [label_of(document.metadata, self._label) for document in documents]
        return judge_each(self._calibration, asked, cosines, labels, k=k), documents[:k]

    def _similarity_search_with_relevance_scores(self, query: str, k: int = 4, **options: Any) -> Any:
        judgement, documents = self.judge(query, k, **options)
        return list(zip(documents, judgement.probabilities, strict=True))

    async def _asimilarity_search_with_relevance_scores(self, query: str, k: int = 4, **options: Any) -> Any:
        return await run_in_executor(None, self._similarity_search_with_relevance_scores, query, k, **options)


def _list_of(name: str, values: Any) -> list[Any]:
    """The values as a list; a `ValueError` for one text or record, which Python would take apart."""
    if isinstance(values, str | Mapping):
        one = name.removesuffix("s")
        raise ValueError(f"{name} must be a list, got the {one} {values!r}: give [{one}]")
    return list(values)


class LamRetriever(BaseRetriever):
    """The k nearest documents, each with `metadata["lam"]`: decision, probability (P(right)) and the query's κ.

    If the decision is not `match`, `on_unknown` chooses between all documents, no documents and an `UnknownQueryError`.
    """

    model_config = ConfigDict(extra="forbid")

    store: LamVectorStore
    k: int = 4
    on_unknown: OnUnknown = "return"

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, filter: Filter = None
    ) -> list[Document]:
        judged, documents = self.store.judge(query, self.k if k is None else k, filter=filter)
        if not judged.is_shown(self.on_unknown):
            return []
        pairs = zip(documents, judged.facts, strict=True)
        return [found.model_copy(update={"metadata": found.metadata | {"lam": fact}}) for found, fact in pairs]
