"""A collection of Qdrant as gallery: it decides as lam's own search does, and rejects other collections."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lam.integrations.qdrant import QdrantGallery
from lam.retrieval import Calibration, judge
from tests.retrieval.decisions.test_judge import CHOICES, D, G, Q, calibration, gallery, hits, items


@pytest.fixture
def client() -> Iterator[Any]:
    from qdrant_client import QdrantClient

    client = QdrantClient(":memory:")
    yield client
    client.close()


def collection(client: Any, *, distance: str = "Cosine", vector: str | None = None) -> str:
    """A collection that another program filled: ids, vectors and a payload of its own."""
    from qdrant_client import models

    params = models.VectorParams(size=D, distance=models.Distance(distance))
    client.create_collection("help", params if vector is None else {vector: params, "other": params})
    stored, labels = gallery()
    points = [
        models.PointStruct(id=place, vector=mean if vector is None else {vector: mean}, payload={"topic": label})
        for place, (mean, label) in enumerate(zip(stored.mean.tolist(), labels, strict=True))
    ]
    client.upsert("help", points)
    return "help"


def test_a_calibration_on_a_collection_is_that_on_its_vectors(client: Any) -> None:
    made = QdrantGallery(client, collection(client), label="topic").calibrate(*items(Q, 2), CHOICES)
    assert made.accept_above == pytest.approx(calibration().accept_above, abs=1e-6)
    assert made.gallery_size == G


@pytest.mark.parametrize("vector", [None, "dense"])
def test_an_existing_collection_is_judged_like_lams_own_gallery(client: Any, vector: str | None) -> None:
    store, made = QdrantGallery(client, collection(client, vector=vector), label="topic", vector=vector), calibration()
    assert (len(store), store.dimension) == (G, D)
    queries, _ = items(40, 3, classes=10)
    answers = store.answer(queries, made, k=3)
    scores, labels = hits(queries.mean)
    expected = judge(made, queries, scores, labels, gallery_size=G)
    assert tuple(answer.decision for answer in answers) == expected.decision
    assert {"match", "unknown"} <= set(expected.decision)
    torch.testing.assert_close(
        torch.tensor([answer.probability for answer in answers]), expected.probability.float(), atol=1e-4, rtol=0
    )
    for answer, kappa, score, row in zip(answers, queries.kappa.tolist(), scores, labels, strict=True):
        assert answer.kappa == kappa
        assert [point.payload["topic"] for point in answer.points] == row[:3]
        assert [point.score for point in answer.points] == pytest.approx(score[:3].tolist(), abs=1e-6)


def test_points_without_the_vector_are_no_items(client: Any) -> None:
    from qdrant_client import models

    store = QdrantGallery(client, collection(client, vector="dense"), label="topic", vector="dense")
    client.upsert("help", [models.PointStruct(id=G, vector={"other": [1.0] * D}, payload={"topic": "3"})])
    assert len(store) == len(store.vectors()[0]) == len(store.vectors()[1]) == G
    assert store.calibrate(*items(Q, 2), CHOICES).gallery_size == G


def test_points_that_lam_adds_are_found_and_replaced(client: Any) -> None:
    from qdrant_client import models

    client.create_collection("own", models.VectorParams(size=D, distance=models.Distance.COSINE))
    store, (stored, labels) = QdrantGallery(client, "own"), gallery()
    store.add(list(range(G)), stored, labels, [{"page": place} for place in range(G)])
    store.add([0], stored[:1], ["another"])
    vectors, found = store.vectors()
    assert found == ["another", *labels[1:]]
    torch.testing.assert_close(vectors, stored.mean, atol=1e-6, rtol=0)
    (first, *_), _ = client.scroll("own", limit=2)[0][1:], None
    assert first.payload == {"page": 1, "label": labels[1], "kappa": pytest.approx(float(stored.kappa[1]))}
    assert store.answer(stored[5:6], calibration(), k=1)[0].points[0].id == 5


def test_a_label_may_lie_deeper_in_the_payload(client: Any) -> None:
    from qdrant_client import models

    client.create_collection("own", models.VectorParams(size=D, distance=models.Distance.COSINE))
    store, (stored, labels) = QdrantGallery(client, "own", label="metadata.topic"), gallery()
    store.add(range(G), stored, labels, [{"text": "a", "metadata": {"page": 1}}] * G)
    assert store.vectors()[1] == list(labels)
    assert client.retrieve("own", [0])[0].payload["metadata"] == {"page": 1, "topic": labels[0]}
    made = store.calibrate(*items(Q, 2), CHOICES)
    answer = store.answer(items(1, 3)[0], made)[0]
    expected = judge(made, items(1, 3)[0], *hits(items(1, 3)[0].mean), gallery_size=G)
    assert answer.probability == pytest.approx(float(expected.probability[0]), abs=1e-4)


def test_points_without_a_label_are_counted(client: Any) -> None:
    store = QdrantGallery(client, collection(client), label="topic")
    client.overwrite_payload("help", {"other": 1}, points=[0, 1])
    with pytest.raises(ValueError, match=f"2 of {G} points.*'help'.*'topic'.*payload"):
        store.calibrate(*items(Q, 2), CHOICES)


def test_a_small_or_unlabelled_collection_is_judged_with_what_it_has(client: Any) -> None:
    from qdrant_client import models

    client.create_collection("own", models.VectorParams(size=D, distance=models.Distance.COSINE))
    store, (stored, labels) = QdrantGallery(client, "own"), gallery()
    (answer,) = store.answer(stored[:1], calibration())
    assert (answer.probability, answer.points) == (0, ())
    store.add([1, 2, 3], stored[:3], ["", *labels[1:3]])
    (answer,) = store.answer(stored[:1], calibration())
    assert answer.points[0].id == 1
    assert len(answer.points) == 3


def test_collections_that_break_the_contract_are_an_error(client: Any) -> None:
    with pytest.raises(ValueError, match="no collection 'help'"):
        QdrantGallery(client, "help")
    collection(client, vector="dense")
    with pytest.raises(ValueError, match=r"vector.*\['dense', 'other'\] in 'help'.*None"):
        QdrantGallery(client, "help")
    client.delete_collection("help")
    collection(client, distance="Euclid")
    with pytest.raises(ValueError, match="need distance Cosine, 'help' has Euclid"):
        QdrantGallery(client, "help")


def test_arguments_that_do_not_fit_are_an_error(client: Any) -> None:
    store, made = QdrantGallery(client, collection(client), label="topic"), calibration()
    stored, labels = gallery()
    with pytest.raises(ValueError, match="equal in number, got 2, 300, 300 and 2"):
        store.add([1, 2], stored, labels)
    with pytest.raises(ValueError, match="^k .*1.*0"):
        store.answer(stored, made, k=0)
    assert store.answer(stored[:0], made) == []
    with pytest.raises(ValueError, match="300 of 300 points.*'help'.*'missing'.*payload"):
        QdrantGallery(client, "help", label="missing").calibrate(*items(Q, 2), CHOICES)
    with pytest.raises(ValueError, match="'missing'.*payload"):
        QdrantGallery(client, "help", label="missing").answer(stored[:1], made)
    with pytest.raises(ValueError, match="dimension 8, got 3"):
        store.add([1], type(stored)(torch.eye(3), *torch.ones(3, 3))[:1], ["a"])
    assert isinstance(made, Calibration)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("kind", ["matrix", "pair"])
def test_vectors_without_kappa_are_an_error(client: Any, kind: str) -> None:
    store, stored = QdrantGallery(client, collection(client), label="topic"), gallery()[0]
    values: Any = stored.mean if kind == "matrix" else (stored.mean, stored.kappa)
    with pytest.raises(ValueError, match=r"must be lam.Embeddings"):
        store.answer(values, calibration())
    with pytest.raises(ValueError, match=r"must be lam.Embeddings"):
        store.add([1], values, ["a"])
