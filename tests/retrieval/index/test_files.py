"""Saved indexes: loading restores them, and detects partly written and altered files."""

import json
import os
import random
import resource
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from lam.retrieval import Index
from lam.utils import files
from lam.utils.files import CorruptFileError, seal
from lam.vmf.embeddings import Embeddings


def embeddings(count: int, seed: int = 0) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(count, 8, generator=generator), dim=1)
    return Embeddings(mean, torch.rand(count, generator=generator), *torch.ones(2, count))


def filled(factory: str, count: int = 60, **options) -> Index:
    index = Index(8, factory, **options)
    if not index.is_trained:
        index.train(embeddings(200))
    index.add(embeddings(count), torch.arange(count) + 100)
    return index


def same(one: Index, other: Index) -> None:
    queries = embeddings(12, seed=5)
    first, second = one.search(queries, k=7), other.search(queries, k=7)
    assert one.ids.tolist() == other.ids.tolist()
    assert first.ids.tolist() == second.ids.tolist()
    assert torch.equal(first.scores, second.scores)
    assert torch.equal(first.kappa, second.kappa)


def generation(folder: Path) -> Path:
    (found,) = folder.glob("generation-*")
    return found


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF4,Flat", "PQ4x4"])
def test_save_and_load_give_the_same_answers_and_the_same_future(factory: str, tmp_path: Path) -> None:
    index = filled(factory)
    index.remove(torch.tensor([100, 103]))
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    same(index, loaded)
    for each in (index, loaded):
        each.remove(torch.tensor([101, 140]))
        each.add(embeddings(3, seed=8), torch.tensor([100, 7, 8]))
    same(index, loaded)


def test_options_are_kept(tmp_path: Path) -> None:
    filled("IVF4,Flat", parameters="nprobe=3").save(tmp_path)
    loaded = Index.load(tmp_path)
    assert (loaded.dimension, loaded.factory, loaded.parameters) == (8, "IVF4,Flat", "nprobe=3")
    assert loaded._faiss.nprobe == 3


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    filled("Flat", 5).save(tmp_path)
    newer = filled("HNSW16", 9)
    newer.save(tmp_path)
    same(newer, Index.load(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MANIFEST.json", generation(tmp_path).name]


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat"])
def test_an_empty_index_is_saved(factory: str, tmp_path: Path) -> None:
    Index(8, factory).save(tmp_path)
    assert len(Index.load(tmp_path)) == 0
    assert Index.load(tmp_path).is_trained == (factory == "Flat")


@pytest.mark.parametrize("damage", ["missing", "altered", "truncated"])
@pytest.mark.parametrize("factory", ["HNSW16", "IVF4,Flat"])
def test_a_bad_cache_is_rebuilt_with_a_warning(factory: str, damage: str, tmp_path: Path) -> None:
    index = filled(factory, parameters="nprobe=4" if "IVF" in factory else None)
    index.save(tmp_path)
    cache = generation(tmp_path) / "search.faiss"
    _damage(cache, damage)
    with pytest.warns(RuntimeWarning, match=r"search\.faiss.*built anew"):
        loaded = Index.load(tmp_path)
    same(index, loaded)


def test_a_cache_that_too_few_embeddings_can_train_becomes_flat(tmp_path: Path) -> None:
    index = filled("IVF4,Flat", 3)
    index.save(tmp_path)
    (generation(tmp_path) / "search.faiss").unlink()
    with pytest.warns(RuntimeWarning, match="built anew"), pytest.warns(RuntimeWarning, match="Flat from now"):
        loaded = Index.load(tmp_path)
    assert loaded.factory == "Flat"
    assert loaded.ids.tolist() == index.ids.tolist()
    assert loaded.search(embeddings(3), k=1).ids.flatten().tolist() == index.ids.tolist()


@pytest.mark.parametrize("damage", ["missing", "altered", "truncated"])
@pytest.mark.parametrize("name", ["embeddings.safetensors", "index.json"])
def test_bad_embeddings_or_metadata_are_an_error_that_names_the_file(name: str, damage: str, tmp_path: Path) -> None:
    filled("Flat").save(tmp_path)
    _damage(generation(tmp_path) / name, damage)
    with pytest.raises(CorruptFileError, match=name.replace(".", r"\.")):
        Index.load(tmp_path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    filled("Flat", 4).save(tmp_path)
    path = generation(tmp_path) / "embeddings.safetensors"
    good = path.read_bytes()
    for position in range(0, len(good), 17):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CorruptFileError, match="truncated or altered"):
            Index.load(tmp_path)


def no_damage_is_believed(folder: Path, flips: int, cuts: int) -> None:
    """Flip bits of each file, and cut it: an error names the file, or the same index is rebuilt without it."""
    index, draw = filled("HNSW8", 20), random.Random(0)
    index.save(folder)
    for path in (folder / "MANIFEST.json", *sorted(generation(folder).iterdir())):
        whole = path.read_bytes()
        for number in range(flips + cuts):
            place = draw.randrange(len(whole))
            flipped = whole[:place] + bytes([whole[place] ^ 1 << number % 8]) + whole[place + 1 :]
            path.write_bytes(flipped if number < flips else whole[:place])
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    same(index, Index.load(folder))
                except CorruptFileError as error:
                    warnings.warn(str(error), RuntimeWarning, stacklevel=1)
            assert path.name == "MANIFEST.json" or path.name in str(told[0].message)
        path.write_bytes(whole)


def test_no_flip_and_no_cut_of_any_file_is_believed(tmp_path: Path) -> None:
    no_damage_is_believed(tmp_path, 20, 10)


@pytest.mark.slow
def test_no_thousand_flips_and_no_500_cuts_of_any_file_are_believed(tmp_path: Path) -> None:
    no_damage_is_believed(tmp_path, 1000, 500)


def _damage(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        middle = len(content) // 2
        altered = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        path.write_bytes(altered if damage == "altered" else content[:middle])


def test_folders_that_hold_no_index_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="MANIFEST.json is missing"):
        Index.load(tmp_path)
    (tmp_path / "note.txt").write_text("hello")
    seal(tmp_path, ["note.txt"])
    with pytest.raises(CorruptFileError, match="names no generation"):
        Index.load(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    filled("Flat", 4).save(tmp_path)
    path = generation(tmp_path) / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    seal(tmp_path, [f"{path.parent.name}/{name}" for name in ("index.json", "embeddings.safetensors")])
    with pytest.raises(ValueError, match="format 99.*version.*3"):
        Index.load(tmp_path)


def test_an_error_while_saving_keeps_the_old_index_and_no_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = filled("Flat", 6)
    old.save(tmp_path)

    def full(*_) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("lam.utils.files.seal", full)
    with pytest.raises(OSError, match="no space left"):
        filled("Flat", 9).save(tmp_path)
    same(old, Index.load(tmp_path))
    assert generation(tmp_path)


@pytest.mark.parametrize(("factory", "count", "room"), [("Flat", 5000, 4096), ("HNSW16", 60, 6000)])
def test_where_there_is_no_room_the_old_index_stays_and_later_there_is_room(
    tmp_path: Path, factory: str, count: int, room: int
) -> None:
    """The disk has no room for the embeddings, or only none for FAISS's file."""
    old, new = filled(factory, 6), filled(factory, count)
    old.save(tmp_path)
    named = {"Flat": r"embeddings\.safetensors", "HNSW16": r"FAISS.*search\.faiss"}[factory]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(OSError, match=named):
            new.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    same(old, Index.load(tmp_path))
    assert generation(tmp_path)
    new.save(tmp_path)
    same(new, Index.load(tmp_path))


@pytest.mark.parametrize("after", ["_manifest_bytes", "read_generation", "read_json", "read_tensors"])
def test_an_index_that_is_replaced_while_it_is_read_loads_as_the_new_one(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer deletes the generation in the manifest before all its files are read."""
    newer = filled("HNSW16", 9)
    filled("HNSW16", 5).save(tmp_path)
    whole = getattr(files, after)

    def interrupted(*arguments, **options):
        result = whole(*arguments, **options)
        monkeypatch.undo()
        newer.save(tmp_path)
        return result

    monkeypatch.setattr(files, after, interrupted)
    same(newer, Index.load(tmp_path))


def test_an_index_that_is_always_replaced_while_it_is_read_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, tries, whole = filled("Flat", 5), [], files.read_generation
    index.save(tmp_path)

    def interrupted(*arguments):
        result = whole(*arguments)
        tries.append(result)
        index.save(tmp_path)
        return result

    monkeypatch.setattr(files, "read_generation", interrupted)
    with pytest.raises(CorruptFileError, match=r"index\.json is missing"):
        Index.load(tmp_path)
    assert 2 < len(tries) < 10


_KILLED_AT_EVERY_STEP = """
    import os, sys
    import torch
    from lam.vmf.embeddings import Embeddings
    from lam.retrieval import Index

    torch.set_num_threads(1)
    mean = torch.nn.functional.normalize(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    items = Embeddings(mean, *torch.ones(3, 30))
    old, new = Index(8, "HNSW8"), Index(8, "HNSW8")
    old.add(items[:10], torch.arange(10))
    new.add(items, torch.arange(30))
    armed, left = False, 0

    def hook(event, arguments):
        global left
        if armed and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod"):
            left -= 1
            if left < 0:
                os._exit(9)

    sys.addaudithook(hook)
    found, finished, step = set(), False, 0
    while not finished:
        old.save(sys.argv[1])
        child = os.fork()
        if child == 0:
            armed, left = True, step
            new.save(sys.argv[1])
            os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loaded = Index.load(sys.argv[1])
        assert len(loaded) in (10, 30), len(loaded)
        assert loaded.search(items[:10], 1).ids.flatten().tolist() == list(range(10))
        found.add(len(loaded))
        step += 1
    assert found == {10, 30}
    old.save(sys.argv[1])
    generations = [name for name in os.listdir(sys.argv[1]) if name.startswith("generation-")]
    assert len(generations) == 1, "remains of killed saves"
    print(step)
"""


_KILLED_AT_RANDOM = """
    import os, random, signal, sys, time
    import torch
    from lam.vmf.embeddings import Embeddings
    from lam.retrieval import Index

    torch.set_num_threads(1)
    mean = torch.nn.functional.normalize(torch.randn(3000, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    items = Embeddings(mean, *torch.ones(3, 3000))
    both = {size: Index(64) for size in (1000, 3000)}
    for size, index in both.items():
        index.add(items[:size], torch.arange(size))
    started = time.perf_counter()
    for index in both.values():
        index.save(sys.argv[1])
    seconds, draw, found = time.perf_counter() - started, random.Random(0), set()
    for kill in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            while True:
                for index in both.values():
                    index.save(sys.argv[1])
        time.sleep(draw.uniform(0, 2 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = Index.load(sys.argv[1])
        assert loaded.ids.tolist() == list(range(len(loaded))), len(loaded)
        assert loaded.search(items[:10], 1).ids.flatten().tolist() == list(range(10))
        found.add(len(loaded))
    assert found == set(both), found
    print(kill + 1)
"""


def killed_at_random(folder: Path, kills: int) -> None:
    script = [sys.executable, "-W", "error", "-c", textwrap.dedent(_KILLED_AT_RANDOM), str(folder), str(kills)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == kills


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_random_moments_of_saving_the_old_index_or_the_new_one_loads(tmp_path: Path) -> None:
    killed_at_random(tmp_path / "index", 20)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_300_random_moments_of_saving_the_old_index_or_the_new_one_loads(tmp_path: Path) -> None:
    killed_at_random(tmp_path / "index", 300)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_step_of_saving_the_old_index_or_the_new_one_loads(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "error", "-c", textwrap.dedent(_KILLED_AT_EVERY_STEP), str(tmp_path / "index")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
