"""The postprocessor of LlamaIndex over an index of a run's texts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from lam.integrations.judging import UnknownQueryError
from lam.integrations.llama_index import LamEmbedding, LamPostprocessor, open_run
from lam.runs.search import search

STRANGE = "zebra quantum"
QUERY = "rail flour piano"


@pytest.fixture(scope="module")
def index(topics_run: Path) -> VectorStoreIndex:
    nodes, embedding, _ = open_run(topics_run)
    return VectorStoreIndex(nodes, embed_model=embedding)


def postprocessor(run: Path, **options: Any) -> LamPostprocessor:
    return open_run(run, **options)[2]


def found(index: VectorStoreIndex, query: str, k: int = 50) -> list[NodeWithScore]:
    return index.as_retriever(similarity_top_k=k).retrieve(query)


@pytest.mark.parametrize("query", [QUERY, "fur whisker purr tail", STRANGE])
def test_scores_are_probabilities_and_the_first_is_that_of_lam_search(
    topics_run: Path, index: VectorStoreIndex, query: str
) -> None:
    expected = search(topics_run, texts=[query], k=3)
    assert expected.decisions is not None
    nodes = postprocessor(topics_run, top_n=3).postprocess_nodes(found(index, query), query_str=query)
    assert [node.node_id for node in nodes] == [item.id for item in expected.items[0]]
    assert nodes[0].score == pytest.approx(float(expected.decisions.probability[0]), abs=1e-4)
    for node in nodes:
        facts = node.metadata["lam"]
        assert facts["probability"] == node.score
        assert facts["decision"] == expected.decisions.decision[0]
        assert facts["kappa"] == pytest.approx(float(expected.queries.kappa[0]), rel=1e-4)


def test_the_cutoff_is_a_probability(topics_run: Path, index: VectorStoreIndex) -> None:
    nodes = found(index, QUERY)
    every = postprocessor(topics_run, top_n=30).postprocess_nodes(nodes, query_str=QUERY)
    cutoff = sorted({node.score or 0.0 for node in every})[-1]
    kept = postprocessor(topics_run, top_n=30, probability_cutoff=cutoff).postprocess_nodes(nodes, query_str=QUERY)
    assert 0 < len(kept) < 30
    assert [node.node_id for node in kept] == [node.node_id for node in every if (node.score or 0.0) >= cutoff]
    assert kept == SimilarityPostprocessor(similarity_cutoff=cutoff).postprocess_nodes(every)
    with pytest.raises(ValueError, match="probability_cutoff"):
        postprocessor(topics_run, probability_cutoff=70)


def test_the_nodes_of_the_retriever_stay_as_they_were(topics_run: Path, index: VectorStoreIndex) -> None:
    nodes = found(index, QUERY)
    before = [node.model_copy(deep=True) for node in nodes]
    judged = postprocessor(topics_run).postprocess_nodes(nodes, query_str=QUERY)
    assert nodes == before
    assert all("lam" not in node.metadata for node in nodes)
    assert "probability" not in judged[0].node.get_content(MetadataMode.LLM)


def test_an_unknown_query_gets_nodes_or_none_or_an_error(topics_run: Path, index: VectorStoreIndex) -> None:
    nodes = found(index, STRANGE)
    assert len(postprocessor(topics_run).postprocess_nodes(nodes, query_str=STRANGE)) == 4
    assert postprocessor(topics_run, on_unknown="empty").postprocess_nodes(nodes, query_str=STRANGE) == []
    with pytest.raises(UnknownQueryError, match="unknown|abstain"):
        postprocessor(topics_run, on_unknown="raise").postprocess_nodes(nodes, query_str=STRANGE)


async def test_a_coroutine_gives_the_same(topics_run: Path, index: VectorStoreIndex) -> None:
    ours, nodes = postprocessor(topics_run), found(index, QUERY)
    assert await ours.apostprocess_nodes(nodes, query_str=QUERY) == ours.postprocess_nodes(nodes, query_str=QUERY)


def scored(*scores: float | None) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text="fur"), score=score) for score in scores]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (scored(*[0.5] * 49), "50 nodes.*49.*similarity_top_k=50.*without filters"),
        (scored(*[0.5] * 49, None), "without a score"),
        (scored(7.0, *[0.5] * 49), "must be cosines"),
        (scored(*[0.5] * 49, 0.9), "best first"),
        (scored(*[float("nan")] * 50), "must be cosines"),
    ],
)
def test_other_scores_and_too_few_nodes_are_refused(topics_run: Path, nodes: list[NodeWithScore], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        postprocessor(topics_run).postprocess_nodes(nodes, query_str=QUERY)


def test_an_unknown_option_is_an_error(topics_run: Path) -> None:
    with pytest.raises(ValueError, match="similarity_cutoff"):
        postprocessor(topics_run, similarity_cutoff=0.7)
    with pytest.raises(ValueError, match="n_sample"):
        LamEmbedding(open_run(topics_run)[1].encoder, n_sample=4)


def test_the_query_is_needed(topics_run: Path, index: VectorStoreIndex) -> None:
    with pytest.raises(ValueError, match="query_str"):
        postprocessor(topics_run).postprocess_nodes(found(index, QUERY))


def test_an_index_of_another_size_than_the_calibration_warns(topics_run: Path, index: VectorStoreIndex) -> None:
    with pytest.warns(UserWarning, match="size is 5000"):
        postprocessor(topics_run, gallery_size=5000).postprocess_nodes(found(index, QUERY), query_str=QUERY)
    small = postprocessor(topics_run)
    small.calibration = replace(small.calibration, gallery_size=30)
    with pytest.warns(UserWarning, match="size is 50.*30.*calibration"):
        small.postprocess_nodes(found(index, QUERY), query_str=QUERY)


def test_a_run_of_images_is_refused(finished_run: Any) -> None:
    with pytest.raises(ValueError, match="takes images"):
        open_run(finished_run.folder)
