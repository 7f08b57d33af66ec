"""The vector store and the retriever of LangChain: its own suite of tests, and the meaning of relevance scores."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from lam.integrations.judging import UnknownQueryError, label_of
from lam.integrations.langchain import LamEmbeddings, LamRetriever, LamVectorStore
from lam.runs.finished import Run
from lam.runs.search import search
from tests.helpers import unchecked
from tests.integrations.conftest import TOPICS

KNOWN = "fur whisker purr tail"
STRANGE = "zebra quantum"
WORDS = [f"word{number}" for number in range(60)]


@pytest.fixture(scope="module")
def run(topics_run: Path) -> Run:
    return Run(topics_run)


@pytest.fixture(scope="module")
def store(topics_run: Path) -> LamVectorStore:
    return LamVectorStore.from_run(topics_run)


@pytest.fixture(scope="module")
def matched(store: LamVectorStore) -> str:
    """A query that is answered `match`."""
    texts = [document.page_content for document in store.similarity_search(KNOWN, k=1000)]
    return next(text for text in texts if store.judge(text)[0].decision == "match")


class TestStandardOfAVectorStoreOfAnyEmbeddings(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> LamVectorStore:
        return LamVectorStore(self.get_embeddings())


class TestStandardOfAVectorStoreOfLam(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, run: Run) -> LamVectorStore:
        return LamVectorStore(LamEmbeddings(run.encoder), run.calibration)


class TestStandardOfTheRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _of_the_run(self, store: LamVectorStore) -> None:
        self.store = store

    @property
    def retriever_constructor(self) -> type[LamRetriever]:
        return LamRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": self.store}

    @property
    def retriever_query_example(self) -> str:
        return "fur and paw"


@pytest.mark.parametrize("query", [KNOWN, "rail and flour", STRANGE])
def test_the_first_relevance_is_the_probability_of_lam_search(
    topics_run: Path, store: LamVectorStore, query: str
) -> None:
    expected = search(topics_run, texts=[query], k=3)
    assert expected.decisions is not None
    found = store.similarity_search_with_relevance_scores(query, k=3)
    assert [document.id for document, _ in found] == [item.id for item in expected.items[0]]
    assert found[0][1] == pytest.approx(float(expected.decisions.probability[0]), abs=1e-5)


def test_documents_of_one_label_share_a_relevance_and_labels_sum_to_at_most_one(store: LamVectorStore) -> None:
    found = store.similarity_search_with_relevance_scores("rail flour piano", k=50)
    by_label: dict[str, set[float]] = {}
    for document, relevance in found:
        by_label.setdefault(document.metadata["label"], set()).add(relevance)
    assert len(by_label) > 1
    assert all(len(relevances) == 1 for relevances in by_label.values())
    assert all(0 <= relevance <= 1 for relevances in by_label.values() for relevance in relevances)
    assert sum(max(relevances) for relevances in by_label.values()) <= 1 + 1e-9


def test_a_document_without_a_label_is_a_class_of_its_own(run: Run) -> None:
    labelled = LamVectorStore.from_run(run.folder)
    labelled.add_texts([KNOWN], ids=["bare"])
    found = {document.id: relevance for document, relevance in labelled.similarity_search_with_relevance_scores(KNOWN)}
    assert sum({*found.values()}) <= 1 + 1e-9
    assert [relevance for name, relevance in found.items() if name != "bare"] != [found["bare"]] * 3


@pytest.mark.parametrize("missing", [float("nan"), np.float32("nan"), "NA", "NaT"])
def test_documents_with_missing_labels_are_no_class(run: Run, missing: Any) -> None:
    """A table leaves NaN, or a value of pandas, where a label is missing."""
    if isinstance(missing, str):
        missing = getattr(pytest.importorskip("pandas"), missing)
    bare, table = (LamVectorStore(LamEmbeddings(run.encoder), run.calibration) for _ in range(2))
    texts = [document.page_content for document in LamVectorStore.from_run(run.folder).similarity_search(KNOWN, k=100)]
    bare.add_texts(texts)
    table.add_texts(texts, [{"label": missing}] * len(texts))
    assert table.judge(KNOWN)[0].probabilities == bare.judge(KNOWN)[0].probabilities


def test_the_label_nan_is_a_label() -> None:
    assert label_of({"bread": "nan"}, "bread") == "nan"


def test_the_label_zero_is_a_label(run: Run, store: LamVectorStore) -> None:
    documents, numbered = store.similarity_search(KNOWN, k=1000), LamVectorStore(store.embeddings, run.calibration)
    number = {label: place for place, label in enumerate(dict.fromkeys(each.metadata["label"] for each in documents))}
    texts, labels = [each.page_content for each in documents], [number[each.metadata["label"]] for each in documents]
    numbered.add_texts(texts, [{"label": label} for label in labels])
    expected, judged = store.judge(KNOWN)[0], numbered.judge(KNOWN)[0]
    assert labels[0] == 0
    assert judged.probabilities == pytest.approx(expected.probabilities, abs=1e-5)


@pytest.mark.parametrize("query", [KNOWN, "rail flour piano"])
async def test_the_threshold_of_a_stock_retriever_is_a_probability(store: LamVectorStore, query: str) -> None:
    scored = store.similarity_search_with_relevance_scores(query, k=20)
    threshold = sorted({relevance for _, relevance in scored})[-1]
    retriever = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": threshold, "k": 20}
    )
    expected = [document for document, relevance in scored if relevance >= threshold]
    assert 0 < len(expected) <= 20
    assert retriever.invoke(query) == expected == await retriever.ainvoke(query)


@pytest.mark.long
def test_a_filter_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function.*{'label': 'a'}"):
        unchecked(LamVectorStore._rank)(
            LamVectorStore(DeterministicFakeEmbedding(size=2)), torch.ones(2), {"label": "a"}
        )


@pytest.mark.filterwarnings("ignore:the searched gallery")
def test_relevances_of_all_ranks_are_shares_of_right_documents(store: LamVectorStore) -> None:
    """For half of the queries, the store lacks their class, as the calibration assumes. This causes the warning."""
    documents = store.similarity_search(KNOWN, k=1000)
    told, right = [[], [], []], [[], [], []]
    for document in documents:
        label = document.metadata["label"]
        for keep in (
            lambda other, own=document: other.id != own.id,
            lambda other, own=label: other.metadata["label"] != own,
        ):
            judged, found = store.judge(document.page_content, 3, filter=keep)
            for rank, (probability, other) in enumerate(zip(judged.probabilities, found, strict=True)):
                told[rank].append(probability)
                right[rank].append(other.metadata["label"] == label)
    gaps = [abs(sum(each) - sum(hits)) / len(hits) for each, hits in zip(told, right, strict=True)]
    assert max(gaps) <= gaps[0] + 0.05  # the calibration of a small run is not better


def test_the_second_label_is_judged_as_if_the_first_were_not_there(store: LamVectorStore) -> None:
    found = store.similarity_search_with_relevance_scores("rail flour piano", k=50)
    first = found[0][0].metadata["label"]
    without = LamVectorStore(store.embeddings, store._calibration)
    rest = [document for document in store.similarity_search(KNOWN, k=1000) if document.metadata["label"] != first]
    without.add_documents(rest)
    with pytest.warns(UserWarning, match=f"size is {len(rest)}"):
        expected = without.similarity_search_with_relevance_scores("rail flour piano", k=1)[0][1]
    second = next(relevance for document, relevance in found if document.metadata["label"] != first)
    assert second == pytest.approx((1 - found[0][1]) * expected, abs=1e-5)


def test_the_retriever_says_decision_probability_and_kappa(
    topics_run: Path, store: LamVectorStore, matched: str
) -> None:
    expected = search(topics_run, texts=[matched], k=1)
    assert expected.decisions is not None
    found = LamRetriever(store=store).invoke(matched, k=2)
    relevances = [relevance for _, relevance in store.similarity_search_with_relevance_scores(matched, k=2)]
    assert [document.metadata["lam"]["probability"] for document in found] == relevances
    assert {document.metadata["lam"]["decision"] for document in found} == set(expected.decisions.decision) == {"match"}
    kappas = [document.metadata["lam"]["kappa"] for document in found]
    assert kappas == pytest.approx([float(expected.queries.kappa[0])] * 2, rel=1e-5)
    assert all("lam" not in document.metadata for document in store.similarity_search(matched))
    others = LamRetriever(store=store).invoke(matched, k=1, filter=lambda document: document.id != found[0].id)
    assert others[0].id == found[1].id


def test_an_unknown_query_gets_documents_or_none_or_an_error(store: LamVectorStore, matched: str) -> None:
    assert len(LamRetriever(store=store).invoke(STRANGE)) == 4
    assert LamRetriever(store=store).invoke(STRANGE)[0].metadata["lam"]["decision"] != "match"
    assert LamRetriever(store=store, on_unknown="empty").invoke(STRANGE) == []
    with pytest.raises(UnknownQueryError, match="unknown|abstain"):
        LamRetriever(store=store, on_unknown="raise").invoke(STRANGE)
    for on_unknown in ("empty", "raise"):
        assert len(LamRetriever(store=store, on_unknown=on_unknown).invoke(matched)) == 4
    with pytest.raises(ValueError, match="on_unknown"):
        LamRetriever(store=store, on_unknown="ignore")  # pyright: ignore[reportArgumentType]
    misspelt: Any = {"on_unkown": "raise"}
    with pytest.raises(ValueError, match="on_unkown"):
        LamRetriever(store=store, **misspelt)


def filled(kind: Any) -> Any:
    store = kind(DeterministicFakeEmbedding(size=16))
    store.add_texts(WORDS, [{"number": number} for number in range(60)], ids=[f"id{number}" for number in range(60)])
    store.delete(["id3", "id7", "missing"])
    return store


def is_even(document: Any) -> bool:
    return document.metadata["number"] % 2 == 0


@pytest.mark.parametrize("keep", [None, is_even])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_any_embeddings_find_what_the_store_of_langchain_finds(k: int, keep: Any) -> None:
    ours, theirs = filled(LamVectorStore), filled(InMemoryVectorStore)
    found = ours.similarity_search_with_score("word7", k, filter=keep)
    expected = theirs.similarity_search_with_score("word7", k, filter=keep)
    assert [document for document, _ in found] == [document for document, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert ours.similarity_search("word7", k, filter=keep) == theirs.similarity_search("word7", k, filter=keep)


@pytest.mark.parametrize("towards_query", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 4, 30])
def test_a_diverse_search_finds_what_that_of_langchain_finds(k: int, towards_query: float) -> None:
    options = {"k": k, "fetch_k": 20, "lambda_mult": towards_query, "filter": is_even}
    found = filled(LamVectorStore).max_marginal_relevance_search("word7", **options)
    assert found == filled(InMemoryVectorStore).max_marginal_relevance_search("word7", **options)


@pytest.mark.parametrize(
    "search", ["similarity_search", "similarity_search_with_score", "max_marginal_relevance_search"]
)
def test_a_search_by_vector_finds_what_the_search_of_its_text_finds(search: str) -> None:
    store = filled(LamVectorStore)
    vector = store.embeddings.embed_query("word7")
    expected = getattr(store, search)("word7", k=3, filter=is_even)
    assert len(expected) == 3
    assert getattr(store, f"{search}_by_vector")(vector, k=3, filter=is_even) == expected


def test_deleting_none_deletes_all(run: Run) -> None:
    store = LamVectorStore.from_texts(WORDS, LamEmbeddings(run.encoder), ids=WORDS, calibration=run.calibration)
    assert store.delete()
    assert store.similarity_search("word7") == store.get_by_ids(WORDS) == []


@pytest.mark.usefixtures("as_in_production")
def test_a_number_is_the_id_that_it_was_when_added() -> None:
    store, number = LamVectorStore(DeterministicFakeEmbedding(size=8)), cast(Any, 7)
    store.add_texts(["seven"], ids=[number])
    assert [document.page_content for document in store.get_by_ids([number])] == ["seven"]
    store.delete([number])
    assert store.get_by_ids(["7"]) == []


def test_an_empty_store_has_no_answer(run: Run) -> None:
    store = LamVectorStore(LamEmbeddings(run.encoder), run.calibration)
    with pytest.warns(UserWarning, match="size is 0"):
        assert store.similarity_search_with_relevance_scores(KNOWN) == []
    with pytest.warns(UserWarning, match="size is 0"), pytest.raises(UnknownQueryError):
        LamRetriever(store=store, on_unknown="raise").invoke(KNOWN)


def test_a_store_of_another_size_than_the_calibration_warns(run: Run) -> None:
    store = LamVectorStore.from_texts(list(TOPICS.values()), LamEmbeddings(run.encoder), calibration=run.calibration)
    with pytest.warns(UserWarning, match="size is 4.*calibration"):
        found = store.similarity_search_with_relevance_scores(KNOWN, k=2)
    assert len(found) == 2


def test_probabilities_need_an_encoder_and_a_calibration(run: Run) -> None:
    for store in (
        LamVectorStore(LamEmbeddings(run.encoder)),
        LamVectorStore(DeterministicFakeEmbedding(size=8), run.calibration),
    ):
        store.add_texts([KNOWN])
        assert len(store.similarity_search_with_score(KNOWN)) == 1
        with pytest.raises(ValueError, match="lam calibrate"):
            store.similarity_search_with_relevance_scores(KNOWN)


def test_an_encoder_of_features_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.encoder, "preprocessing", None)
    with pytest.raises(ValueError, match=r"no preprocessing.*preprocessing=\.\.\."):
        LamEmbeddings(run.encoder)


def test_one_id_is_not_taken_for_the_ids_of_its_letters() -> None:
    store = LamVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_texts(["one", "two", "twelve"], ids=["1", "2", "12"])
    for method in (LamVectorStore.delete, LamVectorStore.get_by_ids):
        with pytest.raises(ValueError, match=r"ids.*list.*'12'.*\[id\]"):
            unchecked(method)(store, "12")
    with pytest.raises(ValueError, match=r"ids.*list.*'12'.*\[id\]"):
        store.add_texts(["a", "b"], ids="12")
    with pytest.raises(ValueError, match=r"metadatas.*list.*page.*\[metadata\]"):
        store.add_texts(["three"], {"page": 2})
    assert [document.page_content for document in store.get_by_ids(["1", "2", "12"])] == ["one", "two", "twelve"]


def test_the_number_zero_is_an_id() -> None:
    store = LamVectorStore(DeterministicFakeEmbedding(size=8))
    assert store.add_texts(["one", "two"], ids=[0, 1]) == ["0", "1"]
    assert [document.page_content for document in store.get_by_ids(["0"])] == ["one"]


def test_metadata_may_be_missing_and_come_one_by_one() -> None:
    store = LamVectorStore(DeterministicFakeEmbedding(size=8))
    with pytest.raises(ValueError, match="texts.*'one'"):
        store.add_texts("one")
    names = store.add_texts(iter(["one", "two"]), iter([None, {"page": 2}]), ids=iter(["1", "2"]))
    assert [document.metadata for document in store.get_by_ids(names)] == [{}, {"page": 2}]


@pytest.mark.parametrize("options", [{"ids": ["1"]}, {"metadatas": [{}]}])
def test_texts_and_ids_must_be_equal_in_number(options: dict[str, Any]) -> None:
    store = LamVectorStore(DeterministicFakeEmbedding(size=8))
    with pytest.raises(ValueError, match="for 2"):
        store.add_texts(["one", "two"], **options)
    assert store.similarity_search("one") == []


class Broken(DeterministicFakeEmbedding):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float("nan")] * self.size for _ in texts]


def test_embeddings_that_are_not_finite_or_of_another_dimension_are_not_stored() -> None:
    with pytest.raises(ValueError, match="finite"):
        LamVectorStore(Broken(size=8)).add_texts(["one"])
    store = LamVectorStore.from_texts(["one"], DeterministicFakeEmbedding(size=8))
    store._embedding = DeterministicFakeEmbedding(size=4)
    with pytest.raises(ValueError, match="dimension.*others, 8.*4"):
        store.add_texts(["two"])
    with pytest.raises(ValueError, match="dimension.*documents, 8.*4"):
        store.similarity_search("two")


def test_an_empty_text_is_named(store: LamVectorStore) -> None:
    with pytest.raises(ValueError, match="text 1: .*empty"):
        store.add_texts([KNOWN, " "])
    with pytest.raises(ValueError, match="^the text.*empty"):
        store.similarity_search("")


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_the_number_of_documents_must_be_positive(store: LamVectorStore, k: Any) -> None:
    for ask in (store.similarity_search, store.similarity_search_with_relevance_scores):
        with pytest.raises(ValueError, match="k must be"):
            ask(KNOWN, k=k)


def test_a_run_of_images_is_refused(finished_run: Any) -> None:
    with pytest.raises(ValueError, match="takes images"):
        LamVectorStore.from_run(finished_run.folder)
