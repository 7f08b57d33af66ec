"""Filters over HTTP: in searches, lists and deletions, and the promise for the filtered part."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from lam.gallery.filters import MAX_FILTER, MAX_LEVELS
from lam.retrieval.decisions.calibration import Calibration, UnmatchedQueries
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.gallery_part import false_accepts, of_part
from lam.retrieval.index.hits import Hits, label_key
from lam.service.engine import Engine
from lam.vmf.embeddings import Embeddings
from tests.helpers import stored
from tests.milvus_servers import CONTRACTS
from tests.service.asking import PNG, client_of, embedding, opened, refused

INDEXES = CONTRACTS


def where(**fields: Any) -> str:
    """A filter on the equality of fields."""
    return json.dumps({"must": [{"key": name, "match": {"value": value}} for name, value in fields.items()]})


@pytest.fixture
def filled(engine: Engine) -> tuple[TestClient, Engine]:
    """Forty items with metadata, in addition to the run's items."""
    client, generator = client_of(engine), torch.Generator().manual_seed(0)
    for n in range(40):
        vector = torch.nn.functional.normalize(torch.randn(engine.gallery.dimension, generator=generator), dim=0)
        facts = {"label": f"own {n % 4}", "metadata": {"n": n, "part": n % 2}}
        item = {"embedding": vector.tolist(), "kappa": 90.0, **facts}
        assert client.put(f"/v1/items/own{n}", json=item).status_code == 201
    return client, engine


def test_a_search_finds_only_what_passes_and_says_what_is_promised(
    filled: tuple[TestClient, Engine], png: bytes
) -> None:
    client, engine = filled
    found = client.post("/v1/search", params={"k": 100, "filter": where(part=1)}, content=png, headers=PNG).json()
    assert {hit["metadata"]["part"] for hit in found["hits"]} == {1}
    assert len(found["hits"]) == found["filter"]["items"] == 20
    assert found["gallery_size"] == 100
    calibration = calibration_of(engine)
    assert calibration.unmatched is not None
    units = len(calibration.unmatched.mean)
    assert found["filter"] == {"items": 20, "unknown_fields": [], "far": calibration.targets.far, "queries": units}
    assert found["accept"] == found["threshold"]["accept"] == "cosine"
    assert found["calibration"] == "current"
    assert found["statistic"] == pytest.approx(found["hits"][0]["score"])
    assert found["probability"] is found["known"] is found["right_if_known"] is found["threshold"]["wrong"] is None
    whole = client.post("/v1/search", content=png, headers=PNG).json()
    assert whole["filter"] is None
    assert whole["probability"] is not None
    assert whole["calibration"] == client.get("/v1/model").json()["calibration"] == "stale"


def test_the_threshold_is_the_quantile_of_the_calibration_queries_in_the_part(
    filled: tuple[TestClient, Engine], png: bytes
) -> None:
    client, engine = filled
    calibration = calibration_of(engine)
    assert calibration.unmatched is not None
    items = stored(engine.gallery, limit=1000)
    for filter, wanted in (
        (where(part=1), {1}),
        ("{}", {0, 1, None}),
        (json.dumps({"must_not": [{"key": "part", "match": {"value": 0}}]}), {1, None}),
    ):
        found = client.post("/v1/search", params={"filter": filter}, content=png, headers=PNG).json()
        kept = [item for item in items if json.loads(item.metadata).get("part") in wanted]
        mean = torch.tensor([item.embedding.tolist() for item in kept]).double()
        keys = torch.tensor([label_key(item.label) for item in kept])
        cosines = calibration.unmatched.mean.double() @ mean.T
        best = cosines.masked_fill(calibration.unmatched.labels[:, None] == keys, -1).amax(1).sort().values
        rank = -(-(len(best) + 1) * 9 // 10)  # ⌈(N + 1)(1 − 0.1)⌉
        assert found["threshold"]["accept_above"] == pytest.approx(float(best[rank - 1]), abs=1e-6)
        assert found["filter"]["items"] == len(kept)


def test_each_query_of_a_batch_has_its_own_filter(filled: tuple[TestClient, Engine]) -> None:
    client, engine = filled
    axis = embedding(engine.gallery.dimension)
    for part in (0, 1, None, 0):
        params = {} if part is None else {"filter": where(part=part)}
        found = client.post("/v1/search", params={"k": 100, **params}, json=axis).json()
        kinds = {hit["metadata"].get("part") for hit in found["hits"]}
        assert kinds == ({0, 1, None} if part is None else {part})


def test_a_field_that_no_item_has_gives_an_empty_answer_that_says_so(
    filled: tuple[TestClient, Engine], png: bytes
) -> None:
    client, _ = filled
    found = client.post("/v1/search", params={"filter": where(colour="red")}, content=png, headers=PNG).json()
    assert found["hits"] == []
    assert found["decision"] in ("unknown", "abstain")
    assert (found["filter"]["items"], found["filter"]["unknown_fields"]) == (0, ["colour"])
    listed = client.get("/v1/items", params={"filter": where(colour="red")}).json()
    assert listed == {"items": [], "after": None, "total": 0, "unknown_fields": ["colour"]}
    deleted = client.delete("/v1/items", params={"filter": where(colour="red")}).json()
    assert deleted == {"deleted": 0, "unknown_fields": ["colour"], "gallery_size": 100}


def test_lists_hold_what_passes_in_pages(filled: tuple[TestClient, Engine]) -> None:
    client, _ = filled
    filter, seen, after = json.dumps({"must": [{"key": "n", "range": {"gte": 10, "lt": 30}}]}), [], ""
    while after is not None:
        page = client.get("/v1/items", params={"filter": filter, "limit": 7, "after": after}).json()
        assert (page["total"], page["unknown_fields"]) == (20, [])
        seen, after = seen + [item["metadata"]["n"] for item in page["items"]], page["after"]
    assert sorted(seen) == list(range(10, 30))


def test_a_filtered_deletion_deletes_what_passes_and_nothing_else(filled: tuple[TestClient, Engine]) -> None:
    client, engine = filled
    deleted = client.delete("/v1/items", params={"filter": where(part=1)}).json()
    assert deleted == {"deleted": 20, "unknown_fields": [], "gallery_size": 80}
    assert client.get("/v1/items", params={"filter": where(part=1)}).json()["total"] == 0
    assert client.get("/v1/items/own3").status_code == 404
    assert client.get("/v1/items/own2").status_code == 200
    hits = client.post("/v1/search?k=100", json=embedding(engine.gallery.dimension)).json()["hits"]
    assert {hit["metadata"].get("part") for hit in hits} == {0, None}
    for filter in ("{}", '{"must": []}', '{"must_not": [{"must": []}]}'):
        assert "every item" in refused(client.delete("/v1/items", params={"filter": filter}), 422)
    refused(client.delete("/v1/items"), 422)
    assert len(engine.gallery) == 80


def test_an_item_searches_a_part_without_itself(filled: tuple[TestClient, Engine]) -> None:
    client, _ = filled
    found = client.get("/v1/items/own2/search", params={"k": 100, "filter": where(part=0)}).json()
    assert len(found["hits"]) == 19
    assert "own2" not in {hit["id"] for hit in found["hits"]}


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ("", "not valid JSON"),
        ("x" * (MAX_FILTER + 1), "filter"),
        ('{"must":[' * 9 + "1" + "]}" * 9, f"nested more than {MAX_LEVELS} deep"),
        ('{"must": [{"key": "a", "match": {"like": "b"}}]}', "one of value, any and except"),
    ],
)
def test_what_is_no_filter_is_refused_everywhere(client: TestClient, png: bytes, filter: str, message: str) -> None:
    asked = {"params": {"filter": filter}}
    for response in (
        client.post("/v1/search", **asked, content=png, headers=PNG),
        client.get("/v1/items", **asked),
        client.delete("/v1/items", **asked),
    ):
        assert message in refused(response, 422)


def test_a_filtered_search_has_no_probability_to_ask_for(client: TestClient, png: bytes) -> None:
    asked = {"filter": where(part=1), "min_probability": 0.5}
    assert "min_probability" in str(client.post("/v1/search", params=asked, content=png, headers=PNG).json())


def test_without_calibration_a_filter_finds_and_promises_nothing(run_copy: Path, png: bytes) -> None:
    with opened(run_copy) as (client, _):
        found = client.post("/v1/search", params={"filter": "{}"}, content=png, headers=PNG).json()
    assert (found["decision"], found["calibration"], found["filter"]["far"]) == (None, "none", None)
    assert len(found["hits"]) == 10


def calibration_of(engine: Engine) -> Calibration:
    assert engine.responder.calibration is not None
    return engine.responder.calibration


def sphere(n: int, classes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Points near the directions of classes."""
    centres = torch.randn(60, 8, generator=torch.Generator().manual_seed(7))
    return torch.nn.functional.normalize(centres[classes] + 0.6 * torch.randn(n, 8, generator=generator), dim=1)


def test_false_accepts_stay_within_the_target_in_each_of_twenty_random_filters(shared_engine: Engine) -> None:
    base = calibration_of(shared_engine)
    alpha, generator = 0.05, torch.Generator().manual_seed(1)
    labels = torch.arange(3000) % 60
    items = sphere(3000, labels, generator)
    means, n_new = list[float](), 4000
    new_labels = torch.randint(60, (n_new,), generator=generator)
    new = sphere(n_new, new_labels, generator)
    for _ in range(20):
        share = float(torch.rand(1, generator=generator)) ** 2
        kept = (torch.rand(3000, generator=generator) < max(share, 0.002)).nonzero().flatten()
        classes = torch.randperm(60, generator=generator)[: int(torch.randint(2, 60, (1,), generator=generator))]
        kept = kept[torch.isin(labels[kept], classes)]
        rates = []
        for _ in range(30):
            own = torch.randint(60, (99,), generator=generator)
            unmatched = UnmatchedQueries(sphere(99, own, generator), own)
            accept_above = threshold(base, unmatched, items[kept], labels[kept], alpha)
            cosines = new @ items[kept].T
            cosines[new_labels[:, None] == labels[kept]] = -torch.inf
            best = cosines.amax(1) if len(kept) else torch.full((n_new,), -torch.inf)
            rates.append(float((best.double() > accept_above).double().mean()))
        means.append(sum(rates) / len(rates))
    # the mean over 30 calibrations of a Beta(5, 95) rate has a standard error of 0.004
    assert max(means) <= alpha + 3.2 * 0.004
    assert sum(means) / 20 <= alpha + 0.002


@pytest.mark.parametrize(("n_classes", "n_kept"), [(2, 1), (5, 1), (10, 5)])
def test_a_filter_by_label_keeps_the_target_for_queries_of_the_other_labels(
    shared_engine: Engine, n_classes: int, n_kept: int
) -> None:
    base = calibration_of(shared_engine)
    generator, rates = torch.Generator().manual_seed(2), []
    labels = torch.arange(60) % n_kept
    items = sphere(60, labels, generator)
    new = sphere(4000, torch.randint(n_kept, n_classes, (4000,), generator=generator), generator)
    for _ in range(60):
        own = torch.randint(n_classes, (99,), generator=generator)
        accept_above = threshold(base, UnmatchedQueries(sphere(99, own, generator), own), items, labels, 0.05)
        rates.append(float(((new @ items.T).amax(1).double() > accept_above).double().mean()))
    assert sum(rates) / 60 <= 0.05 + 3 * 0.004


def test_a_filter_that_leaves_too_few_queries_without_a_match_has_no_bound(shared_engine: Engine) -> None:
    base = calibration_of(shared_engine)
    generator = torch.Generator().manual_seed(0)
    own = torch.arange(30) % 2
    unmatched = UnmatchedQueries(sphere(30, own, generator), own)
    for n_kept, n_scores in ((1, 15), (2, 30)):
        labels = torch.arange(20) % n_kept
        scores = scores_of(base, unmatched, sphere(20, labels, generator), labels, 0.05)
        assert scores is not None
        assert len(scores) == n_scores
    assert scores_of(base, UnmatchedQueries(unmatched.mean, own * 0), unmatched.mean, own * 0, 0.05) is None


def threshold(
    base: Calibration, unmatched: UnmatchedQueries, items: torch.Tensor, labels: torch.Tensor, alpha: float
) -> float:
    """The accept threshold of a part of a gallery."""
    scores = scores_of(base, unmatched, items, labels, alpha)
    assert scores is not None
    return of_part(replace(base, targets=replace(base.targets, far=alpha)), scores, len(items)).accept_above


def scores_of(
    base: Calibration, unmatched: UnmatchedQueries, items: torch.Tensor, labels: torch.Tensor, alpha: float
) -> ConformalScores | None:
    """The scores of the unmatched queries in a part of a gallery."""

    def search(queries: Embeddings, k: int) -> Hits:
        scores, ids = (queries.mean @ items.T).topk(k, dim=1)
        return Hits(ids, scores, torch.ones_like(scores, dtype=torch.float64))

    calibration = replace(base, unmatched=unmatched, targets=replace(base.targets, far=alpha))
    return false_accepts(calibration, search, torch.arange(len(items)), labels)


def test_more_hits_are_searched_where_all_first_ones_match(shared_engine: Engine) -> None:
    base = calibration_of(shared_engine)
    labels = torch.zeros(700, dtype=torch.int64)
    labels[650] = 1
    items = torch.nn.functional.normalize(torch.randn(700, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    query = -items[650:651]  # the only item of another class is the last hit
    found = threshold(base, UnmatchedQueries(query.repeat(19, 1), torch.zeros(19).long()), items, labels, 0.05)
    assert found == pytest.approx(-1, abs=1e-6)
