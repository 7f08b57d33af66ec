"""The live queries that a service keeps: their number, the random sample, and their use by `lam calibrate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lam.runs.finished import Run
from lam.runs.live import EVERY, LiveQueries, live_queries
from lam.service.engine import Engine
from lam.service.settings import ServiceSettings
from lam.utils.files import CorruptFileError, read_json
from lam.vmf.embeddings import Embeddings
from tests.runs.conftest import Lam
from tests.service.asking import PNG, embedding, opened
from tests.service.conftest import encoded

RATES = ("--target-far=0.1", "--target-ood=0.1", "--target-miss=0.1", "--quiet")


def _query(number: int) -> tuple[Embeddings, torch.Tensor]:
    one = torch.ones(1)
    return Embeddings(torch.tensor([[1.0, 0.0, 0.0]]), one, one, one), torch.full((1, 4), float(number))


def _kept(run: Run, size: int, numbers: range) -> LiveQueries:
    """Live queries after these numbers were added."""
    live = LiveQueries(run, size)
    for number in numbers:
        live.add(*_query(number))
    return live


@pytest.mark.long
def test_what_was_searched_for_is_kept_and_calibrated_on(served_run: Path, png: bytes, lam: Lam) -> None:
    settings = ServiceSettings(keep_queries=30)
    with opened(served_run, settings) as (client, engine):
        for shade in range(20):
            picture = encoded(Image.effect_noise((8, 8), 20 + shade))
            assert client.post("/v1/search", content=picture, headers=PNG).status_code == 200
        client.post("/v1/search", json=embedding(engine.gallery.dimension, kappa=5.0))
    embeddings, features = live_queries(Run(served_run))
    assert len(embeddings) == len(features) == 20  # without the warm-up, and without queries that lack features
    assert "20 queries in live" in lam("calibrate", served_run, "--unlabelled=live", *RATES).out

    with opened(served_run, settings) as (client, _):  # continues the earlier sample
        client.post("/v1/search", content=png, headers=PNG)
    again, _ = live_queries(Run(served_run))
    assert len(again) == 21
    assert torch.equal(again.mean[:20], embeddings.mean)


@pytest.mark.long
def test_however_many_come_so_many_are_kept_each_as_likely_as_any_other(served_run: Path) -> None:
    run, size, n, rounds = Run(served_run), 20, 80, 200
    counts = torch.zeros(n)
    for _ in range(rounds):
        live = _kept(run, size, range(n))
        assert live.seen == n
        kept = torch.cat([features for _, features in live._kept])[:, 0].long()
        assert len(kept.unique()) == size
        counts[kept] += 1
    expected = rounds * size / n
    assert float(((counts - expected) ** 2 / expected).sum()) < 160  # chi-squared of 79: 124 at 0.001, times 0.75


def test_one_that_goes_on_with_another_size_prefers_none(served_run: Path) -> None:
    run = Run(served_run)
    live = _kept(run, 20, range(20))
    live.write()
    kept = [int(features[0, 0]) for _ in range(40) for _, features in LiveQueries(run, 10)._kept]
    assert len(kept) == 400
    assert set(kept) == set(range(20))  # happens by chance once in 10^10 times
    for number in range(20, 80):
        live.add(*_query(number))
    live.write()
    # the sample has dropped early queries, so additional ones would all be late
    assert len(_kept(run, 60, range(80, 120))._kept) == 20


def test_one_that_is_kept_keeps_no_others_of_its_batch(served_run: Path) -> None:
    live, (embedding, features) = LiveQueries(Run(served_run), 20), _query(3)
    live.add(Embeddings.concatenate([embedding] * 9)[4:5], features.repeat(9, 1)[4:5])
    ((kept, own),) = live._kept
    assert torch.equal(own, features)
    assert [each.untyped_storage().nbytes() for each in (kept.mean, own)] == [kept.mean.nbytes, own.nbytes]


def test_it_is_written_now_and_then_and_at_the_end_and_damage_is_named(served_run: Path) -> None:
    run = Run(served_run)
    with pytest.raises(ValueError, match="no queries .*`lam serve --keep-queries 2000`"):
        live_queries(run)
    with pytest.raises(ValueError, match="queries to keep.*1.*0"):
        LiveQueries(run, 0)
    live = _kept(run, 500, range(EVERY + 5))
    assert len(live_queries(run)[0]) == EVERY
    live.write()
    assert len(live_queries(run)[0]) == EVERY + 5
    (record,) = (served_run / "live").glob("*/live.json")
    assert read_json(record)["format"] == 1
    (file,) = (served_run / "live").glob("*/queries.safetensors")
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptFileError, match=r"queries\.safetensors"):
        live_queries(run)


def test_where_they_cannot_be_written_the_search_goes_on(
    served_run: Path, png: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lam.runs.live.EVERY", 1)
    monkeypatch.setattr("lam.utils.files.write_generation", full)
    with opened(served_run, ServiceSettings(keep_queries=5)) as (client, _):
        assert client.post("/v1/search", content=png, headers=PNG).status_code == 200
        assert "not kept: [Errno 28] " in caplog.text
    assert caplog.text.count("queries are not kept") == 2


def test_they_are_not_written_where_another_folder_is_now(served_run: Path) -> None:
    live = LiveQueries(Run(served_run), 5)
    live.add(*_query(0))
    served_run.rename(served_run.with_name("moved"))
    with pytest.raises(FileNotFoundError, match="run's folder.*moved"):
        live.write()
    assert not served_run.exists()


def test_a_failed_write_is_not_tried_again_at_each_query(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, tries = LiveQueries(Run(served_run), 5), list[int]()
    monkeypatch.setattr(live, "write", lambda: tries.append(live.seen))  # writes nothing, as on a full disk
    for number in range(2 * EVERY + 9):
        live.add(*_query(number))
    assert tries == [EVERY, 2 * EVERY]


@pytest.mark.parametrize("what", [{"settings": ServiceSettings(keep_queries=5)}, {"drop_corrupt": True}])
def test_a_replica_refuses_what_it_cannot_write(run_copy: Path, what: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="replica writes nothing"):
        Engine(run_copy, replica=True, **what)
