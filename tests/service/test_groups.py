"""Groups by label, a threshold on the cosine, and vectors: the contracts that Qdrant documents for them.

- Groups: `limit` (here `k`) is the greatest number of groups, and `group_size` the greatest number of hits of each, by
  default 3. Groups are in the order of their best hits, hits in the order of their scores. Points without the field are
  in no group. A filter applies before.
- A score threshold leaves out results that are less similar.
- Vectors come on request.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from lam.gallery.gallery import Matching, nearest_by_label
from lam.gallery.item import Item
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.scores import N_HITS
from lam.service.engine import Engine
from tests.milvus_servers import READING
from tests.service.asking import client_of, embedding, refused

INDEXES = READING
D = 3
LABELS = 12


def vectors(count: int) -> np.ndarray:
    drawn = np.random.default_rng(0).normal(size=(count, D)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def many(shared_engine: Engine, writer: Engine) -> Iterator[tuple[TestClient, dict[str, tuple[str, np.ndarray]]]]:
    """The gallery with 400 more items of 12 labels, half of one label, and 20 without; label and vector by id."""
    rows = vectors(420)
    names = ["most" if row % 2 else f"l{row % LABELS}" for row in range(400)] + [""] * 20
    made = [Item(f"g{row}", rows[row].tobytes(), 50.0, name) for row, name in enumerate(names)]
    writer.gallery.write(made)
    stored = {item.id: shared_engine.gallery.store.get(item.id) for item in made}
    stored |= {item_id: shared_engine.gallery.store.get(item_id) for item_id in map(str, range(60))}
    found = {key: (item.label, item.embedding) for key, item in stored.items() if item is not None}
    yield client_of(shared_engine), found
    writer.gallery.write([item.id for item in made])


def expected(
    stored: dict[str, tuple[str, np.ndarray]], query: list[float], k: int, size: int, threshold: float = -1.0
) -> list[tuple[str, list[str]]]:
    """The groups by a plain loop over all cosines."""
    ranked = sorted(stored, key=lambda key: -float(stored[key][1].astype(np.float64) @ np.array(query)))
    groups: dict[str, list[str]] = {}
    for key in ranked:
        label, vector = stored[key]
        is_near = float(vector.astype(np.float64) @ np.array(query)) >= threshold
        if label and is_near and (label in groups or len(groups) < k):
            group = groups.setdefault(label, [])
            if len(group) < size:
                group.append(key)
    return list(groups.items())


def asked(client: TestClient, path: str, query: Any) -> dict[str, Any]:
    """An answer without the fields that differ in every answer."""
    answer = client.post(path, json=query).json()
    return {name: value for name, value in answer.items() if name not in ("answer_id", "promise")}


def found(answer: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(group["label"], [hit["id"] for hit in group["hits"]]) for group in answer["groups"]]


@pytest.mark.parametrize(("k", "size"), [(1, 1), (3, 2), (10, 3), (30, 3), (4, 25), (2, 50)])
@pytest.mark.parametrize("axis", range(D))
def test_groups_are_the_best_labels_and_the_best_items_of_each(many: Any, k: int, size: int, axis: int) -> None:
    client, stored = many
    query = embedding(D, axis)
    answer = client.post(f"/v1/search?group_by=label&k={k}&group_size={size}", json=query).json()
    assert found(answer) == expected(stored, query["embedding"], k, size)
    assert answer["hits"] == []
    for group in answer["groups"]:
        scores = [hit["score"] for hit in group["hits"]]
        assert scores == sorted(scores, reverse=True)
        assert {hit["label"] for hit in group["hits"]} == {group["label"]}


def test_a_group_has_three_items_and_the_decision_is_that_of_the_search(many: Any) -> None:
    client, _ = many
    query = embedding(D, 1, 1e4)
    plain = asked(client, "/v1/search?k=50", query)
    answer = asked(client, "/v1/search?group_by=label", query)
    assert len(answer["groups"]) == 10
    assert max(len(group["hits"]) for group in answer["groups"]) == 3
    assert plain["groups"] is None
    assert {**answer, "groups": None, "hits": plain["hits"]} == plain
    by_id = {hit["id"]: hit for hit in plain["hits"]}
    common = [hit for group in answer["groups"] for hit in group["hits"] if hit["id"] in by_id]
    assert common
    assert common == [by_id[hit["id"]] for hit in common]


def test_groups_within_a_filter(many: Any) -> None:
    client, stored = many
    query, labels = embedding(D, 2), ["l0", "l2", "most"]
    where = {"group_by": "label", "filter": json.dumps({"must": [{"has_label": labels}]})}
    kept = {key: item for key, item in stored.items() if item[0] in labels}
    answer = client.post("/v1/search", params=where, json=query).json()
    assert found(answer) == expected(kept, query["embedding"], 10, 3)
    where["filter"] = json.dumps({"must": [{"has_label": ["nothing"]}]})
    assert client.post("/v1/search", params=where, json=query).json()["groups"] == []


def test_groups_have_limits(many: Any) -> None:
    client, _ = many
    query = embedding(D)
    refused(client.post("/v1/search?group_by=colour", json=query), 422)
    assert "group_by" in refused(client.post("/v1/search?group_size=2", json=query), 422)
    assert "more than 100" in refused(client.post("/v1/search?group_by=label&k=34", json=query), 422)
    refused(client.post("/v1/search?group_by=label&group_size=0", json=query), 422)


def test_a_threshold_leaves_out_less_similar_hits_and_keeps_the_decision(many: Any) -> None:
    client, stored = many
    query = embedding(D, 0, 1e4)
    plain = asked(client, "/v1/search?k=40", query)
    threshold = plain["hits"][7]["score"]
    answer = asked(client, f"/v1/search?k=40&score_threshold={threshold}", query)
    assert answer == {**plain, "hits": [hit for hit in plain["hits"] if hit["score"] >= threshold]}
    assert len(answer["hits"]) == 8
    batch = client.post(f"/v1/search/batch?k=40&score_threshold={threshold}", json={"queries": [query]}).json()
    assert [hit["id"] for hit in batch["answers"][0]["hits"]] == [hit["id"] for hit in answer["hits"]]
    grouped = client.post(f"/v1/search?group_by=label&score_threshold={threshold}", json=query).json()
    assert found(grouped) == expected(stored, query["embedding"], 10, 3, threshold - 1e-9)
    assert client.post("/v1/search?score_threshold=1", json=query).json()["hits"] == []
    for bad in ("2", "nan", "x"):
        refused(client.post(f"/v1/search?score_threshold={bad}", json=query), 422)


def test_vectors_come_where_they_are_asked_for(many: Any) -> None:
    client, stored = many
    query = embedding(D)
    for path in ("/v1/search?", "/v1/search?group_by=label&"):
        for asked in (True, False):
            answer = client.post(f"{path}with_vector={str(asked).lower()}", json=query).json()
            hits = answer["hits"] or [hit for group in answer["groups"] for hit in group["hits"]]
            for hit in hits:
                assert hit["vector"] == (stored[hit["id"]][1].tolist() if asked else None)
    batch = client.post("/v1/search/batch?with_vector=true", json={"queries": [query] * 2}).json()
    for hit in batch["answers"][1]["hits"]:
        assert hit["vector"] == stored[hit["id"]][1].tolist()
    assert client.get("/v1/items/g7?with_vector=true").json()["vector"] == stored["g7"][1].tolist()
    assert client.get("/v1/items/g7").json()["vector"] is None
    page = client.get("/v1/items?limit=1000&with_vector=true").json()["items"]
    listed = {item["id"]: item["vector"] for item in page}
    assert listed == {key: vector.tolist() for key, (_, vector) in stored.items()}


def test_a_vector_that_is_put_in_comes_out_to_the_last_digit(engine: Engine) -> None:
    client, vector = client_of(engine), vectors(1)[0].tolist()
    client.put("/v1/items/exact", json={"embedding": vector, "kappa": 9.0})
    out = client.get("/v1/items/exact?with_vector=true").json()["vector"]
    assert out == pytest.approx(vector, abs=1e-7)  # it is normalised once
    client.put("/v1/items/again", json={"embedding": out, "kappa": 9.0})
    assert client.get("/v1/items/again?with_vector=true").json()["vector"] == pytest.approx(out, abs=1e-7)


def test_one_label_of_most_items_hides_no_other(tmp_path: Path) -> None:
    """One label has more items near the query than a single search returns."""
    count = 5000
    angles = np.linspace(0.0, 0.5, count)
    rows = np.stack([np.cos(angles), np.sin(angles), np.zeros(count)], 1).astype(np.float32)
    labels = np.zeros(count, np.int64)
    labels[-3:] = [1, 2, 2]
    keys = np.arange(count)
    depths: list[int] = []

    def search(k: int, among: np.ndarray | None) -> Hits:
        chosen = keys if among is None else among
        depths.append(min(k, len(chosen)))
        scores = rows[chosen] @ rows[0]
        order = np.argsort(-scores, kind="stable")[:k]
        one = torch.from_numpy(scores[order])[None]
        return Hits(torch.from_numpy(chosen[order])[None], one, torch.ones_like(one, dtype=torch.float64))

    groups = nearest_by_label(search, Matching(keys, labels, ()), n_groups=3, size=2)
    assert [[place.key for place in group] for group in groups] == [[0, 1], [4997], [4998, 4999]]
    assert [place.rank for place in groups[0]] == [0, 1]
    assert groups[1][0].rank is None
    assert depths == [N_HITS, 3]
