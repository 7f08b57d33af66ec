"""Several runs in one process, and reloads; `test_exchanges` tests concurrent requests."""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lam.cli.commands import _named_runs
from lam.runs.folder import GALLERY
from lam.runs.live import FOLDER as LIVE
from lam.service.app import ServedRuns
from lam.service.engine import Engine
from lam.service.keys import Keys
from lam.service.limits import Limits
from lam.utils.files import MANIFEST, locked
from tests.runs.conftest import Lam
from tests.service.asking import HOST, PNG, client_of, refused
from tests.service.conftest import SMALL
from tests.service.test_exchanges import point

Two = tuple[ServedRuns, TestClient]


@pytest.fixture
def two(served_run: Path, tmp_path: Path) -> Iterator[Two]:
    """Two runs in one process, and a client of both."""
    other = Path(shutil.copytree(served_run, tmp_path / "other"))
    runs = ServedRuns({"first": served_run, "second": other}, lambda folder: Engine(folder, SMALL))
    yield runs, TestClient(Limits(runs.sites, SMALL), base_url=HOST, raise_server_exceptions=False)
    runs.sites.close()


def test_each_run_answers_under_its_name_and_the_first_at_the_root(two: Two, png: bytes) -> None:
    runs, client = two
    assert client.put("/runs/second/v1/items/a%2Fnew", content=png, headers=PNG).status_code == 201
    sizes = [client.get(f"{root}/v1/ready").json()["gallery_size"] for root in ("", "/runs/first", "/runs/second")]
    assert sizes == [60, 60, 61]
    assert client.post("/runs/second/v1/search?k=1", content=png, headers=PNG).json()["hits"][0]["id"] == "a/new"
    assert client.get("/runs/second/v1/items/a/new/thumbnail").headers["content-type"] == "image/png"
    refused(client.get("/v1/items/a/new"), 404)
    assert client.get("/runs/second/").headers["content-type"].startswith("text/html")
    assert client.get("/runs/second/app.js").status_code == 200
    schemas = [client.get(f"{root}/openapi.json").json()["servers"] for root in ("", "/runs/first", "/runs/second")]
    assert schemas == [[{"url": "/"}], [{"url": "/"}], [{"url": "/runs/second"}]]
    assert 'route="/v1/search"' in client.get("/runs/second/metrics").text
    assert 'route="/v1/search"' not in client.get("/metrics").text
    folders = {name: engine.run.folder.name for name, engine in runs.engines.items()}
    assert folders == {"first": "run", "second": "other"}


@pytest.mark.parametrize("keys", [None, Keys({"k" * 9: "write"})])
def test_the_name_of_a_run_without_a_slash_leads_to_its_page(two: Two, keys: Keys | None) -> None:
    client = TestClient(Limits(two[0].sites, SMALL, keys=keys), base_url=HOST)
    answer = client.get("/runs/second", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "./second/")
    assert client.get("/runs/second").text == client.get("/runs/second/").text
    assert client.post("/runs/second", headers={"X-API-Key": "k" * 9}).status_code == 404


@pytest.mark.parametrize("path", ["/runs/third/v1/model", "/runs/third/", "/runs/third", "/runs/", "/runs//v1/model"])
def test_an_unknown_run_is_404_and_tells_the_names_to_those_with_a_key(two: Two, path: str) -> None:
    runs, client = two
    response = client.get(path)
    assert "name" in refused(response, 404)
    assert response.json()["allowed"] == ["/runs/first/", "/runs/second/"]
    keyed = TestClient(Limits(runs.sites, SMALL, keys=Keys({"k" * 9: "read"})), base_url=HOST)
    assert "first" not in keyed.get(path).text
    refused(keyed.get(path), 401)


def test_rights_hold_under_names_too(two: Two, png: bytes) -> None:
    runs, _ = two
    client = TestClient(Limits(runs.sites, SMALL, keys=Keys({"k" * 9: "read"})), base_url=HOST)
    key = {"X-API-Key": "k" * 9}
    assert client.get("/runs/second/v1/health").status_code == 200
    refused(client.get("/runs/second/v1/model"), 401)
    assert client.get("/runs/second/v1/model", headers=key).status_code == 200
    refused(client.put("/runs/second/v1/items/a", content=png, headers={**PNG, **key}), 403)
    refused(client.post("/runs/second/v1/reload", headers=key), 403)


def test_names_come_from_folders_or_are_told(tmp_path: Path, lam: Lam) -> None:
    (tmp_path / "a=b").mkdir()
    words = [f"{tmp_path}/one", f"faces={tmp_path}/two", f"{tmp_path}/a=b"]
    assert list(_named_runs(words)) == ["one", "faces", "a=b"]
    for wrong in (["x/run", "y/run"], ["=x"], ["..=x"]):
        assert "needs a name" in lam("serve", *wrong, code=1).err
    said = lam("serve", "a=x", "b=y", "--index", "milvus://db/photographs", code=1).err
    assert "Milvus collection" in said
    assert "got x, /" in lam("serve", "a=x", f"b={Path('x').absolute()}", code=1).err


def test_a_name_of_any_characters_is_an_address(served_run: Path, tmp_path: Path) -> None:
    folders = {"first": served_run, "50% ü?": Path(shutil.copytree(served_run, tmp_path / "other"))}
    with contextlib.closing(ServedRuns(folders, Engine).sites) as sites:
        schema = TestClient(Limits(sites, SMALL), base_url=HOST).get("/runs/50%25 ü%3F/openapi.json").json()
    assert schema["servers"] == [{"url": "/runs/50%25%20%C3%BC%3F"}]


def test_a_run_that_cannot_be_opened_releases_those_before(served_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        ServedRuns({"first": served_run, "second": tmp_path / "none"}, Engine)
    with locked(served_run / GALLERY):
        pass


def test_a_reload_reads_the_calibration_or_tells_why_not(engine: Engine) -> None:
    client, before = client_of(engine), engine.responder
    expected = {"run": "run", "exchanged": False, "calibration": "current", "gallery_size": 60}
    assert client.post("/v1/reload").json() == expected
    assert engine.responder is not before
    tables = next((engine.run.folder / "calibration").glob("*/tables.safetensors"))
    tables.write_bytes(tables.read_bytes()[:-1])
    now = engine.responder
    assert "tables.safetensors is truncated" in refused(client.post("/v1/reload"), 409)
    assert engine.responder is now


def test_no_request_waits_for_the_schema(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema takes a tenth of a second, in which no request would be answered."""
    monkeypatch.setattr("lam.service.schema.request_schemas", lambda: pytest.fail("built within a request"))
    assert [two[1].get(f"{root}/v1/items?limit=1").status_code for root in ("", "/runs/second")] == [200, 200]


def test_a_reload_of_what_is_no_run_is_told_and_leaves_nothing_open(served_run: Path, tmp_path: Path) -> None:
    """A broken link, a file, a link to itself, and a run that first fails after opening, and then is repaired."""
    other, link = Path(shutil.copytree(served_run, tmp_path / "other")), tmp_path / "current"
    link.symlink_to(served_run)
    settings = replace(SMALL, keep_queries=9)
    with contextlib.closing(ServedRuns({"first": link}, lambda folder: Engine(folder, settings)).sites) as sites:
        client = TestClient(Limits(sites, SMALL), base_url=HOST, raise_server_exceptions=False)
        for target in (tmp_path / "none", link, served_run / "metrics.json"):
            point(link, target)
            assert "stays as it" in refused(client.post("/v1/reload"), 409)
        point(link, other)
        (other / LIVE).mkdir()
        (other / LIVE / MANIFEST).write_text("{")
        threads = threading.active_count()
        assert "live" in refused(client.post("/v1/reload"), 409)
        assert threading.active_count() == threads
        with locked(other / GALLERY):
            pass
        assert client.get("/v1/model").json()["run"] == "run"


def test_a_hangup_reloads_the_other_runs_whatever_happens_to_one(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    runs, _ = two
    runs._open, before = lambda folder: 1 // 0, runs.engines["second"].responder
    runs._folders["first"] = runs._folders["second"]
    asyncio.run(runs.reload_all())
    assert runs.engines["second"].responder is not before
    assert "first stays" in caplog.text
