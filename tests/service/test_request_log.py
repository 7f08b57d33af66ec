"""Ids of requests, the log of requests, and slow requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from lam.service.engine import Engine
from lam.service.tracing import RequestLog
from tests.service.asking import PNG, client_of, embedding, refused
from tests.service.serving import until

SECRET = "s3cret-key"


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("sent", ["a", "Root=1-67/abc:9.+@=_", "x" * 128])
def test_a_plain_id_of_the_client_is_kept(shared_engine: Engine, sent: str) -> None:
    response = client_of(shared_engine).get("/v1/items/none", headers={"X-Request-ID": sent})
    refused(response, 404)
    assert response.headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, '"', "\\n", "é".encode().decode("latin1"), "<b>"])
def test_another_id_of_the_client_is_replaced(shared_engine: Engine, sent: str) -> None:
    client, named = client_of(shared_engine), {"X-Request-ID": sent.encode("latin1")}
    ids = [client.get("/v1/health", headers=named).headers["x-request-id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert all(len(each) == 32 and each.isalnum() for each in ids)


def test_every_request_is_a_line_without_its_content(engine: Engine, png: bytes, tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "access.jsonl")
    client = client_of(engine, key=SECRET, log=log)
    key = {"X-API-Key": SECRET}
    client.put("/v1/items/private-id?label=oakwood", content=png, headers={**PNG, **key})
    client.post("/v1/search?k=3", json=embedding(engine.gallery.dimension), headers={**key, "X-Request-ID": "mine"})
    client.get("/v1/items", headers={"X-API-Key": "wrong-one"})
    client.get("/nowhere")
    log.close()
    text = (tmp_path / "access.jsonl").read_text()
    added, searched, unknown, nowhere = lines(text)
    assert (added["method"], added["route"], added["status"]) == ("PUT", "/v1/items/{id}", 201)
    assert added["received"] == len(png)
    assert set(added["stages"]) == {"decoding", "network", "store"}
    assert 0 < sum(added["stages"].values()) <= added["seconds"]
    assert (searched["id"], searched["status"], set(searched["stages"])) == ("mine", 200, {"search"})
    assert searched["sent"] > 100
    assert (unknown["status"], unknown["stages"], nowhere["route"]) == (401, {}, "other")
    for private in (SECRET, "wrong-one", "private-id", "oakwood", "k=3"):
        assert private not in text


def test_only_slow_requests_are_logged_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog(None, slow=0.5)
    log.note(0.1, id="quick")
    log.note(0.7, id="slow", stages={"search": 0.6})
    log.close()
    assert lines(capsys.readouterr().err) == [{"id": "slow", "stages": {"search": 0.6}, "seconds": 0.7, "slow": True}]


def test_slow_requests_are_marked_among_all(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", slow=0.5)
    log.note(0.1)
    log.note(0.5)
    log.close()
    assert [line["slow"] for line in lines((tmp_path / "log").read_text())] == [False, True]


def test_a_log_may_be_moved_and_a_disk_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "log"
    with pytest.raises(OSError, match="log"):
        RequestLog(path)
    path.parent.mkdir()
    log = RequestLog(path)
    log.note(0.1, number=1)
    until(path.read_text, seconds=5.0)
    path.rename(tmp_path / "old")
    path.parent.rmdir()
    log.note(0.1, number=2)
    until(lambda: "are lost" in caplog.text, seconds=5.0)
    path.parent.mkdir()
    log.note(0.1, number=3)
    log.close()
    assert [line["number"] for file in (tmp_path / "old", path) for line in lines(file.read_text())] == [1, 3]
    assert "1 lines of the request log are lost" in caplog.text


def test_a_log_that_cannot_keep_up_drops_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(tmp_path / "log")
    monkeypatch.setattr("lam.service.tracing._MOST", 0)
    log.note(0.1, number=1)
    monkeypatch.undo()
    log.note(0.1, number=2)
    log.note(0.1, number=3)
    log.close()
    written = lines((tmp_path / "log").read_text())
    assert [(line["number"], line.get("dropped")) for line in written] == [(2, 1), (3, None)]
