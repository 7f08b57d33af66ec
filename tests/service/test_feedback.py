"""The promise of a service: answers report its state; feedback counts once, and is kept after crashes."""

import json
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lam.gallery.refusal import Refusal
from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.finished import Run
from lam.runs.folder import WATCH
from lam.service import watch
from lam.service.engine import Engine
from lam.service.watch import FILE, Watch
from lam.utils.files import CorruptFileError
from tests.conftest import unrendered_pictures
from tests.helpers import stored
from tests.service import serving
from tests.service.asking import JSON, PNG, client_of, embedding, opened, refused
from tests.service.conftest import SMALL
from tests.service.serving import Served, served


@pytest.fixture
def client(engine: Engine) -> TestClient:
    """A client of an engine that a test may change."""
    return client_of(engine)


def search(client: TestClient, query: dict[str, Any] | None = None) -> dict[str, Any]:
    query = query or embedding(client.get("/v1/model").json()["dimension"])
    return client.post("/v1/search", json=query).json()


def feedback(client: TestClient, answer: dict[str, Any], **told: Any) -> Any:
    return client.post("/v1/feedback", json={"answer_id": answer["answer_id"], **told})


def readings(client: TestClient) -> dict[str, dict[str, Any]]:
    return {test["name"]: test for test in client.get("/v1/model").json()["promise"]["tests"]}


def match(engine: Engine, label: str) -> dict[str, Any]:
    """An answer `match` whose first hit has a label; few answers of such a small run are matches."""
    return {"answer_id": engine.watch.count("match", 50.0, 0.9, label)[0]}


def test_an_answer_says_that_the_promise_holds(client: TestClient, png: bytes) -> None:
    counts = {name: test["n"] for name, test in readings(client).items()}
    assert counts == dict.fromkeys(("kappa", "cosine", "far", "wrong"), 0)
    answer = client.post("/v1/search", content=png, headers=PNG).json()
    assert answer["promise"] == "holds"
    assert len(answer["answer_id"]) == 56
    assert client.get("/v1/model").json()["promise"]["state"] == "holds"
    assert [readings(client)[name]["n"] for name in ("kappa", "cosine")] == [1, 1]
    text = client.get("/metrics").text
    assert 'lam_promise{state="holds"} 1.0' in text
    assert 'lam_promise{state="broken"} 0.0' in text
    assert 'lam_promise_observations{test="kappa"} 1.0' in text


def test_only_new_queries_of_the_whole_gallery_count(client: TestClient, engine: Engine) -> None:
    item = stored(engine.gallery, limit=1)[0].id
    where = json.dumps({"must": [{"has_id": [item]}]})
    query = embedding(engine.gallery.dimension)
    for answer in (
        client.get(f"/v1/items/{item}/search").json(),
        client.post("/v1/search", params={"filter": where}, json=query).json(),
    ):
        assert (answer["promise"], answer["answer_id"]) == (None, None)
    assert readings(client)["kappa"]["n"] == 0


def test_strangers_among_the_queries_raise_doubt(client: TestClient, engine: Engine) -> None:
    states = [search(client, embedding(engine.gallery.dimension, kappa=1e-3))["promise"] for _ in range(30)]
    assert (states[0], states[-1]) == ("holds", "in doubt")
    assert 'lam_promise{state="in doubt"} 1.0' in client.get("/metrics").text


def test_feedback_is_counted_once(client: TestClient, engine: Engine) -> None:
    known = stored(engine.gallery, limit=1)[0].label
    answer = match(engine, known)
    given = feedback(client, answer, label="a label that no item has")
    assert given.status_code == 200
    assert given.json() == {"counted": ["far", "wrong"], "promise": "holds"}
    assert "judged before" in refused(feedback(client, answer, correct=True), 409)
    assert [readings(client)[name]["errors"] for name in ("far", "wrong")] == [1, 1]
    for label, told, wrong, counted in (
        (known, {"label": known}, 0, ["wrong"]),
        ("another", {"label": known}, 1, ["wrong"]),
        ("", {"label": known}, 0, []),  # a hit without a label may be right
        (known, {"label": ""}, 1, ["far", "wrong"]),
        (known, {"correct": True}, 0, ["wrong"]),
        (known, {"correct": False}, 1, ["wrong"]),
    ):
        before = readings(client)["wrong"]["errors"]
        assert feedback(client, match(engine, label), **told).json()["counted"] == counted
        assert readings(client)["wrong"]["errors"] - before == wrong
    assert readings(client)["far"]["n"] == 2


def test_of_the_answers_to_one_stranger_only_the_first_counts(served_run: Path) -> None:
    for counted in (["far", "wrong"], []):  # even after a restart
        with opened(served_run, SMALL) as (client, engine):
            for label, expected in (("an unknown oak", counted), ("an unknown oak", []), ("", ["far", "wrong"])):
                assert feedback(client, match(engine, "oak"), label=label).json()["counted"] == expected
    with opened(served_run, SMALL) as (client, _):
        assert readings(client)["far"]["n"] == 3


def test_answers_that_are_no_match_are_judged_by_a_label(client: TestClient, engine: Engine) -> None:
    query = embedding(engine.gallery.dimension, kappa=1e-3)
    answer = search(client, query)
    assert answer["decision"] == "abstain"
    assert "by a label" in refused(feedback(client, answer, correct=True), 422)
    assert feedback(client, answer, label="").json()["counted"] == ["far"]
    known = stored(engine.gallery, limit=1)[0].label
    assert feedback(client, search(client, query), label=known).json()["counted"] == []
    assert (readings(client)["far"]["n"], readings(client)["far"]["errors"]) == (1, 0)


def test_many_false_accepts_break_the_promise(client: TestClient, engine: Engine) -> None:
    states = [feedback(client, match(engine, "oak"), label="").json()["promise"] for _ in range(40)]
    assert states[-1] == "broken"
    assert search(client)["promise"] == "broken"
    assert 'lam_promise{state="broken"} 1.0' in client.get("/metrics").text


def test_feedback_that_is_not_understood(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = search(client)
    other = answer["answer_id"][:-1] + ("A" if answer["answer_id"][-1] != "A" else "B")
    for unknown in ("", "?", "x" * 56, other, answer["answer_id"][:-4]):
        assert "of this id" in refused(feedback(client, {"answer_id": unknown}, correct=True), 404)
    assert "label or correct" in refused(feedback(client, answer), 422)
    assert "label or correct" in refused(feedback(client, answer, label="oak", correct=True), 422)
    for wrong in ({"label": 3}, {"correct": "yes"}, {"label": "\x00"}, {"label": "x" * 5000}, {"note": "x"}):
        refused(feedback(client, answer, **wrong), 422)
    refused(client.post("/v1/feedback", json={"answer_id": "x" * 10_000, "correct": True}), 422)
    refused(client.post("/v1/feedback", content=b"[", headers=JSON), 400)
    refused(client.post("/v1/feedback", content=b"x", headers=PNG), 415)
    refused(client.post("/v1/feedback?label=oak", json={"answer_id": answer["answer_id"], "label": ""}), 422)
    later = time.time() + 31 * 86_400
    monkeypatch.setattr(watch.time, "time", lambda: later)
    assert "31 days old" in refused(feedback(client, answer, label=""), 409)
    assert readings(client)["far"]["n"] == 0


def test_a_run_without_calibration_promises_nothing(served_run: Path, png: bytes) -> None:
    shutil.rmtree(served_run / "calibration")
    with opened(served_run, SMALL) as (client, _):
        answer = client.post("/v1/search", content=png, headers=PNG).json()
        assert (answer["promise"], answer["answer_id"]) == (None, None)
        assert client.get("/v1/model").json()["promise"] is None
        assert "lam_promise" not in client.get("/metrics").text


def test_the_state_is_found_again(served_run: Path) -> None:
    with opened(served_run, SMALL) as (client, _):
        answer, unjudged = search(client), search(client)
        feedback(client, answer, label="")
        before = client.get("/v1/model").json()["promise"]
    with opened(served_run, SMALL) as (client, _):
        assert client.get("/v1/model").json()["promise"] == before
        refused(feedback(client, answer, label=""), 409)
        assert feedback(client, unjudged, label="").status_code == 200


def test_another_calibration_is_another_promise(served_run: Path) -> None:
    with opened(served_run, SMALL) as (client, engine):
        answer = search(client)
        feedback(client, answer, label="")
        engine.recalibrate()
        assert readings(client)["far"]["n"] == 1  # the same calibration, read again
        with unrendered_pictures():
            targets = Targets(far=0.2, ood=0.1, conformal_miss=0.1)
            calibrate_run(served_run, CalibrationOptions(targets=targets, flag="kappa"), progress=False)
        late = search(client)
        engine.recalibrate()
        assert {test["n"] for test in readings(client).values()} == {0}
        assert "an earlier calibration" in refused(feedback(client, late, label=""), 409)
        assert feedback(client, search(client), label="").status_code == 200


def test_searches_go_on_before_the_promise_of_a_first_calibration_begins(
    calibrated_run: Path, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(run_copy, SMALL) as (client, engine):
        shutil.copytree(calibrated_run / "calibration", run_copy / "calibration")
        with monkeypatch.context() as patched:
            patched.setattr(engine.watch, "renew", lambda calibration: None)
            engine.recalibrate()
        answer = search(client)
        assert (answer["decision"] is None, answer["promise"], answer["answer_id"]) == (False, None, None)
        engine.recalibrate()
        assert search(client)["promise"] == "holds"


def test_altered_files_are_named(served_run: Path) -> None:
    Engine(served_run, SMALL).close()
    path = served_run / WATCH / FILE
    with closing(sqlite3.connect(path)) as database, database:
        (tests,) = database.execute("SELECT tests FROM promise").fetchone()
        database.execute("UPDATE promise SET tests = ?", (tests[:-1] + bytes([tests[-1] ^ 1]),))
    with pytest.raises(CorruptFileError, match=f"{FILE}: it was altered"):
        Engine(served_run, SMALL)
    path.write_bytes(b"no database" * 100)
    with pytest.raises(CorruptFileError, match=FILE):
        Engine(served_run, SMALL)
    shutil.rmtree(path.parent)
    Engine(served_run, SMALL).close()


def test_a_backup_keeps_the_promise_and_the_judged_answers(client: TestClient, engine: Engine) -> None:
    judged, other = search(client), search(client)
    while client.get("/v1/model").json()["promise"]["state"] != "broken":
        judged = match(engine, "2")
        assert feedback(client, judged, label="").status_code == 200
    name = client.post("/v1/backup").json()["name"]
    with opened(engine.run.folder.parent / name, SMALL) as (restored, _):
        assert search(restored)["promise"] == "broken"
        assert readings(restored)["far"] == readings(client)["far"]
        assert feedback(restored, judged, label="").status_code == 409
        assert feedback(restored, other, label="").status_code == 200


def test_feedback_that_cannot_be_stored_is_not_counted(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = search(client)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(engine.watch, "_write", fail)
        assert "disk I/O error" in refused(feedback(client, answer, label=""), 507)
    assert readings(client)["far"]["n"] == 0
    assert feedback(client, answer, label="").status_code == 200
    assert readings(client)["far"]["n"] == 1


@pytest.mark.long
def test_acknowledged_feedback_survives_a_kill(served_run: Path) -> None:
    body = json.dumps(embedding(Run(served_run).encoder.dimension)).encode()
    judged, answers = list[str](), list[str]()

    def judge(found: Served, answer_id: str) -> int:
        told = json.dumps({"answer_id": answer_id, "label": ""}).encode()
        return found.ask("POST", "/v1/feedback", told, JSON)[0]

    for number in range(3):
        with served(served_run) as found:
            for answer_id in judged:
                assert judge(found, answer_id) == 409
            answers = [found.ask("POST", "/v1/search", body, JSON)[1]["answer_id"] for _ in range(8)]
            for answer_id in answers[: 4 + number]:
                assert judge(found, answer_id) == 200
                judged.append(answer_id)
            _, model = found.ask("GET", "/v1/model")
            found.process.kill()  # SIGKILL: nothing is written at the end
        assert {test["name"]: test["n"] for test in model["promise"]["tests"]}["far"] == len(judged)
    with served(served_run) as found:
        tests = {test["name"]: test for test in found.ask("GET", "/v1/model")[1]["promise"]["tests"]}
        assert (tests["far"]["n"], tests["kappa"]["n"]) == (len(judged), 8 * 3)
        assert judge(found, answers[-1]) == 200  # of a service that was killed


@pytest.mark.slow
def test_a_flood_of_feedback_leaves_health_alone(
    served_run: Path, record_property: Callable[[str, object], None]
) -> None:
    body = json.dumps(embedding(Run(served_run).encoder.dimension)).encode()
    with served(served_run, "lam", "serve") as found:
        ids = [found.ask("POST", "/v1/search", body, JSON)[1]["answer_id"] for _ in range(400)]
        told = [json.dumps({"answer_id": answer_id, "label": "oak"}).encode() for answer_id in ids]
        with serving.Watch(found) as seen, ThreadPoolExecutor(8) as pool:
            statuses = Counter(pool.map(lambda one: found.ask("POST", "/v1/feedback", one, JSON)[0], told))
    record_property("feedback", json.dumps({**seen.told(), "statuses": statuses}))
    assert statuses.keys() <= {200, 503}
    assert statuses[200] > 100
    assert seen.p99() < 0.1  # the clients share the processors


def test_a_watch_in_memory_writes_nothing(engine: Engine) -> None:
    calibration = engine.responder.calibration
    with closing(Watch(None, calibration)) as first, closing(Watch(None, calibration)) as second:
        answer, _, _ = first.count("match", 50.0, 0.9, "oak")
        given: Any = {"answer_id": answer, "label": "", "correct": None, "holds": lambda label: False}
        assert first.judge(**given) == (["far", "wrong"], "holds")
        with pytest.raises(Refusal, match="judged before"):
            first.judge(**given)
        with pytest.raises(Refusal, match="no answer"):  # of another watch
            second.judge(**given)
    assert not Path(":memory:").exists()


def test_a_replica_watches_its_own_queries(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_gallery = Run.open_gallery
    monkeypatch.setattr(Run, "open_gallery", lambda run, *, index, **_: open_gallery(run, index=index))
    with opened(served_run, SMALL, replica=True) as (client, engine):
        assert feedback(client, match(engine, "oak"), label="").status_code == 200
        assert readings(client)["far"]["n"] == 1
    assert not (served_run / WATCH).exists()
