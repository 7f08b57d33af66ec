import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lam import files


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


def test_every_cut_and_every_flipped_bit_is_caught_and_named(tmp_path: Path):
    folder = tmp_path / "saved"
    files.write_generation(folder, lambda new: write_pair(new, 1.0))
    generator = torch.Generator().manual_seed(0)
    for path in sorted(folder.glob("generation-*/*")):
        content = path.read_bytes()
        for position in torch.randint(len(content), (40,), generator=generator).tolist():
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            for altered in (bytes(flipped), content[:position]):
                path.write_bytes(altered)
                with pytest.raises(files.CorruptFileError, match=f"{path.name} is truncated or altered"):
                    files.read_generation(folder)
        path.unlink()
        with pytest.raises(files.CorruptFileError, match=f"{path.name} is missing"):
            files.read_generation(folder)
        path.write_bytes(content)
    assert read_pair(folder) == 1.0


def test_manifests_that_are_wrong_are_refused(tmp_path: Path):
    with pytest.raises(files.CorruptFileError, match=r"MANIFEST.json is missing"):
        files.verify(tmp_path)
    manifest = tmp_path / files.MANIFEST
    for content, message in [
        ("{", "not valid JSON"),
        ("[]", "no sha256 table"),
        (json.dumps({"sha256": {"../outside": "00"}}), "lies outside the folder"),
        (json.dumps({"sha256": {"/etc/hostname": "00"}}), "lies outside the folder"),
        (json.dumps({"sha256": {}}), "names no generation"),
    ]:
        manifest.write_text(content)
        with pytest.raises(files.CorruptFileError, match=message):
            files.read_generation(tmp_path)
    files.seal(tmp_path, [])
    with pytest.raises(files.CorruptFileError, match="does not list weights"):
        files.verify(tmp_path, ["weights"])


def test_a_copied_folder_reads_alike(tmp_path: Path):
    files.write_generation(tmp_path / "one", lambda new: write_pair(new, 3.0))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert read_pair(tmp_path / "two") == 3.0
