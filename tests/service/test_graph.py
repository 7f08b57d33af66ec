"""A service that searches its gallery along a graph, beside one that searches it exactly."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lam.cli import main
from tests.runs.conftest import Lam
from tests.service.asking import opened
from tests.service.conftest import SMALL
from tests.service.serving import started


def directions(count: int, seed: int = 0) -> list[list[float]]:
    drawn = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(drawn, dim=1).tolist()


def test_a_graph_answers_as_an_exact_search_does(served_run: Path, tmp_path: Path) -> None:
    """In a small gallery of 260 items, the graph finds all neighbours."""
    answers: dict[str, list[Any]] = {}
    for index in ("flat", "hnsw"):
        run = Path(shutil.copytree(served_run, tmp_path / index))
        with opened(run, SMALL, index=index) as (service, _):
            for number, direction in enumerate(directions(200)):
                octant = "".join("+" if value > 0 else "-" for value in direction)  # so that neighbours agree
                item = {"embedding": direction, "kappa": 40.0, "id": f"new{number}", "label": octant}
                assert service.post("/v1/items", json=item).status_code == 201
            queries = [{"embedding": direction, "kappa": 2e3} for direction in directions(300, 1)]
            found = [service.post("/v1/search?k=20", json=query) for query in queries]
            answers[index] = [{**answer.json(), "answer_id": None, "promise": None} for answer in found]
    assert len(answers["flat"][0]["hits"]) == 20
    assert {answer["decision"] for answer in answers["flat"]} >= {"match", "unknown"}
    equal = np.mean([one == other for one, other in zip(*answers.values(), strict=True)])
    assert equal >= 0.99


def test_the_model_says_how_much_is_found(served_run: Path) -> None:
    with opened(served_run, SMALL, index="hnsw") as (service, _):
        model = service.get("/v1/model").json()
        assert model["index"] == "HNSW32"
        assert model["index_recall"] == {"queries": 60, "k": 10, "recall": 1.0, "hits": 50, "unchanged": 1.0}
        schemas = service.get("/openapi.json").json()["components"]["schemas"]
        assert set(schemas["RecallFields"]["required"]) == set(model["index_recall"])
        assert "index_recall" in schemas["ModelResponse"]["required"]
    for options in ({"index": "flat"}, {}):
        with opened(served_run, SMALL, **options) as (service, _):
            model = service.get("/v1/model").json()
            assert (model["index"], model["index_recall"]) == ("Flat", None)


def test_the_start_says_how_much_is_found(served_run: Path) -> None:
    with started("lam", "serve", "--index", "hnsw", run=served_run) as (process, _, _):
        assert process.stdout is not None
        said = process.stdout.readline()
    assert said == (
        "HNSW32 finds 100 % of the 10 nearest neighbours of 60 stored items, and for 100 % of these items the same 50 "
        "hits as an exact search\n"
    )


def test_two_kinds_at_once_or_one_that_is_none_are_refused(served_run: Path, lam: Lam) -> None:
    said = lam("serve", "run", "--index=hnsw", "--index", "milvus://db.example/items", code=1).err
    assert "give --index once, got hnsw, milvus://db.example/items" in said
    assert "Milvus" in said
    said = lam("serve", served_run, "--port=0", "--index=ivf", code=1).err
    assert "index must be flat, hnsw or" in said


def test_the_command_passes_the_kind_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("lam.service.server.serve", lambda *_, index, **__: given.append(index))
    for words in ([], ["--index=flat"], ["--index", "hnsw"], ["--index", "milvus://db.example/items"]):
        assert main(["serve", "run", *words]) == 0
    assert given == [None, "flat", "hnsw", "milvus://db.example/items"]
