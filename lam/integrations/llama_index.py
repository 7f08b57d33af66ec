"""LlamaIndex: a postprocessor that scores nodes by P(right); and a run's texts and encoder, to build an index."""

from pathlib import Path
from typing import Any

import torch

from lam.encoders.base import Encoder
from lam.integrations.judging import OnUnknown, fields_of, judge_each, label_of, predict_texts, text_encoder
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.metrics.scores import N_HITS
from lam.runs.finished import Run
from lam.utils.extras import needs_extra

with needs_extra("llama-index", "the adapter of LlamaIndex"):
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from pydantic import ConfigDict, Field, InstanceOf

_TOLERANCE = 1e-4  # of a cosine in float32


class LamEmbedding(BaseEmbedding):
    """Mean directions of an encoder of texts, as `embed_model` of an index; `n_samples` as in `Encoder.embed`."""

    model_config = ConfigDict(extra="forbid")

    encoder: InstanceOf[Encoder]
    n_samples: int | None = None

    def __init__(self, encoder: Encoder, **options: Any) -> None:
        super().__init__(**{"encoder": text_encoder(encoder), **options})

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return predict_texts(self.encoder, texts, n_samples=self.n_samples).embeddings.mean.tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LamPostprocessor(BaseNodePostprocessor):
    """Returns the first nodes, scored by P(right); replaces `SimilarityPostprocessor`.

    The retriever must return 50 nodes (`similarity_top_k=50`) or all, with their cosines and without filters. Each
    returned node has `metadata["lam"]`: decision, probability and the query's κ.

    Args:
        encoder: encoder of the index and the queries.
        calibration: calibration of the encoder on a gallery like the index.
        probability_cutoff: nodes with a smaller P(right) are left out, in [0, 1].
        top_n: greatest number of nodes to return.
        gallery_size: number of nodes in the index; None for the size at the calibration, or the number of
            retrieved nodes if that is larger.
        label: the metadata field with a node's label; a node without this field has a label of its own.
        on_unknown: chooses between all nodes, no nodes and an `UnknownQueryError` if the decision is not `match`.
        n_samples: as in `Encoder.embed`.
    """

    model_config = ConfigDict(extra="forbid")  # such as `similarity_cutoff`, the option of `SimilarityPostprocessor`

    encoder: InstanceOf[Encoder]
    calibration: InstanceOf[Calibration]
    probability_cutoff: float = Field(0.0, ge=0, le=1)
    top_n: int = 4
    gallery_size: int | None = None
    label: str = "label"
    on_unknown: OnUnknown = "return"
    n_samples: int | None = None

    @classmethod
    def class_name(cls) -> str:
        return "LamPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("P(right) depends on the query: pass query_str or query_bundle")
        size = self.gallery_size
        if size is None:
            size = max(self.calibration.gallery_size, len(nodes))
        cosines = _cosines_of(nodes, min(N_HITS, size))
        asked = predict_texts(self.encoder, [query_bundle.query_str], n_samples=self.n_samples)
        labels = [label_of(node.metadata, self.label) for node in nodes]
        judged = judge_each(self.calibration, asked, cosines, labels, k=self.top_n, gallery_size=size)
        if not judged.is_shown(self.on_unknown):
            return []
        return [
            NodeWithScore(node=_with_facts(found.node, facts), score=facts["probability"])
            for found, facts in zip(nodes, judged.facts, strict=False)
            if facts["probability"] >= self.probability_cutoff
        ]


def open_run(folder: str | Path, **options: Any) -> tuple[list[TextNode], LamEmbedding, LamPostprocessor]:
    """Nodes (the gallery's texts with embeddings), the `embed_model` for an index of them, and the postprocessor.

    A run on images, or without calibration, raises a `ValueError`. `options` are options of `LamPostprocessor`.
    """
    run = Run(folder)
    gallery, calibration = run.gallery, run.calibration
    embedding = LamEmbedding(run.encoder, n_samples=gallery.mean_samples)
    if calibration is None:
        raise ValueError(f"{run.folder} has no calibration, which P(right) needs: run `lam calibrate {run.folder}`")
    nodes = []
    for item in gallery.items:
        fields = fields_of(item)
        node = TextNode(id_=item.id, text=item.text or "", metadata=fields, embedding=item.embedding.tolist())
        node.excluded_embed_metadata_keys = list(fields)  # the run embedded the text alone
        nodes.append(node)
    of_run = {"encoder": run.encoder, "calibration": calibration, "n_samples": gallery.mean_samples}
    return nodes, embedding, LamPostprocessor(**of_run, **options)


def _cosines_of(nodes: list[NodeWithScore], least: int) -> torch.Tensor:
    """(N,) scores of the nodes, which must be cosines, best first."""
    if len(nodes) < least:
        raise ValueError(
            f"P(right) needs {least} nodes, got {len(nodes)}: set similarity_top_k={least} in the retriever, without "
            "filters"
        )
    if any(node.score is None for node in nodes):
        raise ValueError("every node needs its cosine as score, got a node without a score")
    cosines = torch.tensor([node.score for node in nodes], dtype=torch.float32)
    if not (cosines.abs() <= 1 + _TOLERANCE).all() or (cosines.diff() > _TOLERANCE).any():
        raise ValueError(
            f"scores must be cosines, best first, got {cosines[:3].tolist()}...: put LamPostprocessor before a reranker"
        )
    return cosines.clamp(-1, 1)


def _with_facts(node: Any, facts: dict[str, Any]) -> Any:
    """A copy of a node with `metadata["lam"]`, hidden from embedding and language models."""
    copy = node.model_copy(update={"metadata": {**node.metadata, "lam": facts}})
    copy.excluded_embed_metadata_keys = [*node.excluded_embed_metadata_keys, "lam"]
    copy.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, "lam"]
    return copy
