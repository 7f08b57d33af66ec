"""Keys with rights: their sources, and allowed operations."""

from pathlib import Path
from typing import Any

import pytest

from lam.service.engine import Engine
from lam.service.keys import RIGHTS, Keys, right_for
from tests.service.asking import PNG, client_of, embedding, refused

READ, WRITE, ADMIN = "r" * 20, "w" * 20, "a" * 20
SECRETS: dict[str, Any] = {READ: "read", WRITE: "write", ADMIN: "admin"}


def header(key: str) -> dict[str, str]:
    return {"X-API-Key": key}


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key in the environment."""
    monkeypatch.delenv("LAM_API_KEY", raising=False)


def keys_in(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_every_operation_needs_at_least_the_right_that_its_method_says(shared_engine: Engine) -> None:
    """The schema names the rights; operations that change the gallery need more than `read`."""
    paths = client_of(shared_engine).get("/openapi.json").json()["paths"]
    rights = {}
    for method, operation in (each for path in paths.values() for each in path.items()):
        needed = {name for way in operation["security"] for each in way.values() for name in each}
        rights[operation["operationId"]] = (method, needed)
    assert all(rights[name] == ("post", {"read"}) for name in ("search", "embed", "verify"))
    assert all(rights[name] == ("get", set()) for name in ("get_health", "get_ready"))
    assert rights["delete_item"][1] == rights["put_item"][1] == rights["add_item"][1] == {"write"}
    for name, (method, needed) in rights.items():
        if method == "get":
            assert needed <= {"read"}, name
        if method in ("put", "patch", "delete"):
            assert needed <= {"write", "admin"}, name


def test_a_key_may_do_what_its_right_includes(engine: Engine, png: bytes) -> None:
    client, body = client_of(engine, keys=Keys(SECRETS)), embedding(engine.gallery.dimension)
    for key in SECRETS:
        assert client.post("/v1/search", json=body, headers=header(key)).status_code == 200
        assert client.get("/v1/items", headers=header(key)).status_code == 200
    size = len(engine.gallery)
    for method, path in (("PUT", "/v1/items/new"), ("POST", "/v1/items"), ("DELETE", "/v1/items/new")):
        response = client.request(method, path, content=png, headers={**PNG, **header(READ)})
        assert "the right 'read'" in refused(response, 403)
        assert response.json()["allowed"] == ["write", "admin"]
    assert len(engine.gallery) == size
    assert client.put("/v1/items/new", content=png, headers={**PNG, **header(WRITE)}).status_code == 201
    assert client.delete("/v1/items/new", headers=header(ADMIN)).status_code == 200
    refused(client.get("/v1/items", headers=header(READ[:-1])), 401)


def test_a_key_without_the_right_of_a_route_is_refused_before_anything_is_read(shared_engine: Engine) -> None:
    """For each route in the schema, with a body and parameters that no route accepts."""
    client, bad = client_of(shared_engine, keys=Keys(SECRETS)), {"content": b"\0", "params": {"nothing": "1"}}
    refusals = 0
    for path, operations in client.get("/openapi.json", headers=header(READ)).json()["paths"].items():
        where = path.replace("{", "").replace("}", "")
        for method, operation in operations.items():
            needed = {right for way in operation["security"] for rights in way.values() for right in rights}
            for place, key in enumerate((None, *SECRETS)) if needed else ():
                response = client.request(method, where, headers={} if key is None else header(key), **bad)
                least = RIGHTS.index(next(iter(needed))) + 1
                assert (response.status_code in (401, 403)) is (place < least), (method, path, key)
                refusals += place < least
    assert refusals > 30


def test_a_right_includes_those_below_it() -> None:
    assert RIGHTS == ("read", "write", "admin")
    assert [Keys(SECRETS).right_of(key.encode()) for key in (READ, WRITE, ADMIN, "x", "")] == [*RIGHTS, None, None]
    assert right_for("POST", "/v1/whatever-comes") == right_for("PATCH", "/v1/items/a") == "write"


def test_keys_are_read_from_a_file_and_the_environment(
    tmp_path: Path, no_key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Keys.read() is None
    file = keys_in(tmp_path / "keys", f"\ufeff# who searches\nread {READ}\n\n write\t {WRITE} \r\n")
    monkeypatch.setenv("LAM_API_KEY", f"{ADMIN}\n")
    keys = Keys.read(file)
    assert keys is not None
    assert [keys.right_of(key.encode()) for key in SECRETS] == list(RIGHTS)
    assert not any(secret in repr(vars(keys)) for secret in SECRETS)


def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, no_key: None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys.read(file := keys_in(tmp_path / "keys", f"read {READ}"))
    assert keys is not None
    for text in (f"write {WRITE}\nadmin {ADMIN}", "nonsense"):
        Path(file).unlink()
        keys_in(tmp_path / "keys", text)
        assert [keys.right_of(key.encode()) for key in SECRETS] == [None, "write", "admin"]
    assert len(caplog.records) == 1
    keys_in(tmp_path / "keys", f"read {ADMIN}")
    assert keys.right_of(ADMIN.encode()) == "read"


@pytest.mark.parametrize("text", [None, "", f"# read {READ}\n"], ids=["deleted", "empty", "comment"])
def test_no_key_of_a_file_outlives_its_last_line(
    tmp_path: Path, no_key: None, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setenv("LAM_API_KEY", ADMIN)
    keys = Keys.read(file := keys_in(tmp_path / "keys", f"read {READ}"))
    assert keys is not None
    assert keys.right_of(READ.encode()) == "read"
    Path(file).unlink()
    if text is not None:
        keys_in(tmp_path / "keys", text)
    assert [keys.right_of(key.encode()) for key in SECRETS] == [None, None, "admin"]
    keys_in(tmp_path / "keys", f"read {READ}")
    assert keys.right_of(READ.encode()) == "read"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        (f"root {READ}", "line 1.*RIGHT KEY"),
        (READ, "line 1.*RIGHT KEY"),
        ("read", "line 1.*ASCII"),
        ("\nread clé", "line 2.*ASCII"),
        ("read a b", "no spaces"),
        (f"read {'k' * 4097}", "at most 4096"),
        (f"read {READ}\nwrite {READ}", "line 2 repeats"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_without_showing_a_key(
    tmp_path: Path, no_key: None, text: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        Keys.read(keys_in(tmp_path / "keys", text))
    assert READ not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path: Path, no_key: None, mode: int) -> None:
    with pytest.raises(ValueError, match="chmod 600"):
        Keys.read(keys_in(tmp_path / "keys", f"read {READ}", mode))
