import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lam.utils import files

Writer = Callable[[Path, int], None]
WRITERS: dict[str, Writer] = {
    "text": lambda path, size: files.write_text(path, "x" * size),
    "JSON": lambda path, size: files.write_json(path, "x" * size),
    "tensors": lambda path, size: files.write_tensors(path, {"x": torch.zeros(size)}),
}


def write_pair(generation: Path, value: float) -> None:
    files.write_tensors(generation / "a.safetensors", {"x": torch.full((4,), value)})
    files.write_json(generation / "b.json", {"value": value})


def read_pair(folder: Path) -> float:
    generation = files.read_generation(folder, ["a.safetensors", "b.json"])
    value = files.read_json(generation / "b.json")["value"]
    assert (files.read_tensors(generation / "a.safetensors")["x"] == value).all()
    return value


def test_a_failing_writer_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file.txt"
    files.write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


@contextlib.contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Within the context, the system refuses files larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_where_there_is_no_room_the_old_file_stays_and_later_there_is_room(tmp_path: Path, writer: Writer):
    path = tmp_path / "file"
    writer(path, 10)
    old = path.read_bytes()
    with no_room_beyond(4096), pytest.raises(OSError, match="File too large") as error:
        writer(path, 100_000)
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    writer(path, 100_000)
    assert path.stat().st_size >= 100_000


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(("module", "name", "call"), [(os, "fsync", 1), (os, "fsync", 2), (Path, "replace", 1)])
def test_an_input_output_error_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Writer, module: object, name: str, call: int
):
    writer(tmp_path / "other", 20)
    new, path, calls = (tmp_path / "other").read_bytes(), tmp_path / "file", iter(range(1, 9))
    writer(path, 10)
    old, original = path.read_bytes(), getattr(module, name)

    def fails(*arguments: object) -> object:
        if next(calls) == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments)

    monkeypatch.setattr(module, name, fails)
    with pytest.raises(OSError, match="Input/output error"):
        writer(path, 20)
    assert path.read_bytes() == (new if call == 2 else old)  # the second call syncs the folder, after the rename
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "other"]
    writer(path, 20)
    assert path.read_bytes() == new


def test_the_file_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), sync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("rename"), rename(self, to))[1])
    files.write_text(tmp_path / "file.txt", "text")
    assert events == ["sync", "rename", "sync"]


@pytest.mark.parametrize("step", ["fsync", "replace", "seal"])
def test_a_save_that_dies_at_any_step_leaves_the_old_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step):
    folder = tmp_path / "saved"
    files.write_generation(folder, lambda new: write_pair(new, 1.0))
    calls = 0

    def fail(*arguments: object) -> None:
        raise OSError("Input/output error")

    while True:
        calls += 1
        with monkeypatch.context() as patch:
            count = 0
            target = {"fsync": (os, "fsync"), "replace": (Path, "replace"), "seal": (files, "seal")}[step]
            original = getattr(*target)

            def sometimes(*arguments: object, original=original, calls=calls) -> object:
                nonlocal count
                count += 1
                return fail() if count == calls else original(*arguments)

            patch.setattr(*target, sometimes)
            try:
                files.write_generation(folder, lambda new: write_pair(new, 2.0))
            except OSError:
                assert read_pair(folder) in (1.0, 2.0)
            else:
                break
    assert read_pair(folder) == 2.0
    assert len(list(folder.glob("generation-*"))) == 1


def test_a_save_deletes_no_folder_of_the_user(tmp_path: Path):
    names = ["generation-1", "generation-", f"generation-{'g' * 32}", f"generation-{'0' * 33}"]
    for name in names:
        (tmp_path / name).mkdir()
        files.write_text(tmp_path / name / "results.csv", name)
    for value in (1.0, 2.0):
        files.write_generation(tmp_path, lambda new, value=value: write_pair(new, value))
        assert read_pair(tmp_path) == value
        assert [(tmp_path / name / "results.csv").read_text() for name in names] == names
    assert len(list(tmp_path.glob("generation-*"))) == len(names) + 1


def test_a_save_that_fails_over_a_damaged_manifest_says_why_and_leaves_nothing(tmp_path: Path):
    for content in ("{", "[]", "{}"):
        (tmp_path / files.MANIFEST).write_text(content)
        with no_room_beyond(4096), pytest.raises(OSError, match="File too large"):
            files.write_generation(tmp_path, lambda new: files.write_text(new / "a.txt", "x" * 100_000))
        assert [path.name for path in tmp_path.iterdir()] == [files.MANIFEST]


def every_damage_is_caught(folder: Path, flips: int, cuts: int) -> int:
    """Check that bit flips, cuts and deletion of each sealed file are detected; returns the number of files."""
    generator = torch.Generator().manual_seed(0)
    paths = [folder / name for name in files.read_json(folder / files.MANIFEST)["sha256"]]
    for path in paths:
        content = path.read_bytes()
        places = torch.randint(len(content), (flips + cuts,), generator=generator).tolist()
        for number, place in enumerate(places):
            flipped = content[:place] + bytes([content[place] ^ (1 << (number % 8))]) + content[place + 1 :]
            path.write_bytes(flipped if number < flips else content[:place])
            with pytest.raises(files.CorruptFileError, match=f"{path.name}.*truncated"):
                files.verify(folder)
        path.unlink()
        with pytest.raises(files.CorruptFileError, match=f"{path.name} is missing"):
            files.verify(folder)
        path.write_bytes(content)
    files.verify(folder)
    return len(paths)


def test_every_cut_and_every_flipped_bit_is_caught_and_named(tmp_path: Path):
    folder = tmp_path / "saved"
    files.write_generation(folder, lambda new: write_pair(new, 1.0))
    assert every_damage_is_caught(folder, 40, 40) == 2
    assert read_pair(folder) == 1.0


@pytest.mark.slow
def test_a_thousand_flipped_bits_and_500_cuts_of_a_run_are_caught_and_named(run_copy: Path):
    folders = [manifest.parent for manifest in run_copy.rglob(files.MANIFEST)]
    assert sum(every_damage_is_caught(folder, 1000, 500) for folder in folders) > 4


def test_manifests_that_are_wrong_are_refused(tmp_path: Path):
    with pytest.raises(files.CorruptFileError, match=r"MANIFEST.json is missing"):
        files.verify(tmp_path)
    manifest = tmp_path / files.MANIFEST
    for content, message in [
        ("{", "not valid JSON"),
        ("[]", "no sha256 table"),
        (json.dumps({"sha256": {"../outside": "00"}}), "lies outside.*folder"),
        (json.dumps({"sha256": {"/etc/hostname": "00"}}), "lies outside.*folder"),
        (json.dumps({"sha256": {}}), "names no generation"),
    ]:
        manifest.write_text(content)
        with pytest.raises(files.CorruptFileError, match=message):
            files.read_generation(tmp_path)
    files.seal(tmp_path, [])
    with pytest.raises(files.CorruptFileError, match="not list weights"):
        files.verify(tmp_path, ["weights"])


def test_a_copied_folder_reads_alike(tmp_path: Path):
    files.write_generation(tmp_path / "one", lambda new: write_pair(new, 3.0))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert read_pair(tmp_path / "two") == 3.0


def test_tensors_are_aligned_as_torch_aligns_its_own(tmp_path: Path) -> None:
    tensors = {f"{rows} rows": torch.randn(rows, 7) for rows in range(1, 9)}
    files.write_tensors(tmp_path / "tensors.safetensors", tensors)
    read = files.read_tensors(tmp_path / "tensors.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert {tensor.data_ptr() % 64 for tensor in read.values()} == {0}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # from Python 3.12 on
def test_a_lock_ends_with_its_block_whoever_was_forked_meanwhile(tmp_path: Path) -> None:
    """Workers that load images are forked, too; the lock leaves nothing in the folder."""
    reading, writing = os.pipe()
    with contextlib.suppress(KeyError), files.locked(tmp_path):
        with pytest.raises(ValueError, match="is in use"), files.locked(tmp_path):
            pass
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the other end is closed
            os._exit(0)
        raise KeyError
    try:
        with files.locked(tmp_path):
            assert list(tmp_path.iterdir()) == []
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.check_output(tmp_path / "new.csv")
    with pytest.raises(ValueError, match="no folder .*deeper.*new.csv"):
        files.check_output(tmp_path / "deeper" / "new.csv")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}.*written.*this user"):
        files.check_output(tmp_path / "new.csv")
    with pytest.raises(ValueError, match=f"deeper.*written.*this user.*{tmp_path}"):
        files.check_writable(tmp_path / "deeper")


@pytest.mark.parametrize("text", ["a\rb", "a\nb", "a\r\nb", 'a "b", c', "", "\r\n"])
def test_any_text_survives_a_csv_file(text: str, tmp_path: Path) -> None:
    rows = [{"text": text, "label": "1"}, {"text": "last", "label": text}]
    files.write_csv(tmp_path / "rows.csv", ("text", "label"), rows)
    assert files.read_csv(tmp_path / "rows.csv") == rows
    assert b"label\n" in (tmp_path / "rows.csv").read_bytes()
