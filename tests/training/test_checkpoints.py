"""Checkpoints: the last good one is always read, whatever happened to the newest."""

from pathlib import Path

import pytest
import torch

from lam.training import checkpoints
from lam.utils import files
from lam.utils.files import CorruptFileError, seal, write_record


def tensors(value: float) -> dict[str, torch.Tensor]:
    weight = torch.full((3, 2), value)
    return {"weight": weight, "tied": weight, "step": torch.tensor(value), "count": torch.tensor(7)}


def save(folder: Path, *numbers: int) -> None:
    for number in numbers:
        checkpoints.save(folder, number, tensors(number), {"number": number, "loss": 0.1 + number})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = tmp_path / "checkpoint-00000001"
    write_record(newest / "state.json", {"number": 1}, format=99)
    seal(newest, ["tensors.safetensors", "state.json"])
    with pytest.raises(ValueError, match=r"state\.json.*format 99.*version.*1"):
        checkpoints.load(tmp_path)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    save(tmp_path, 3)
    checkpoint = checkpoints.load(tmp_path)
    assert checkpoint.state == {"number": 3, "loss": 3.1}
    assert checkpoint.path.name == "checkpoint-00000003"
    assert checkpoint.tensors.keys() == tensors(3).keys()
    for name, tensor in tensors(3).items():
        assert torch.equal(checkpoint.tensors[name], tensor)
        assert checkpoint.tensors[name].dtype == tensor.dtype


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoints.load(tmp_path) is None
    assert checkpoints.load(tmp_path / "missing") is None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 100_000_000, 100_000_001)
    assert names(tmp_path) == ["checkpoint-100000000", "checkpoint-100000001"]
    assert checkpoints.load(tmp_path).state["number"] == 100_000_001


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "checkpoint-00000002" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-9])
    if damage == "remove":
        path.unlink()
    with pytest.warns(UserWarning, match=r"checkpoint-00000002.*before checkpoint-00000002 is used"):
        assert checkpoints.load(tmp_path).state["number"] == 1


def test_a_damaged_checkpoint_is_replaced_when_its_number_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoint-00000002" / "state.json").unlink()
    save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]
    assert checkpoints.load(tmp_path).state["number"] == 2


def test_larger_numbers_are_discarded(tmp_path: Path) -> None:
    save(tmp_path, 1, 5, 3)
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000003"]


def test_only_damaged_checkpoints_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoint-00000001" / "MANIFEST.json").unlink()
    with (
        pytest.warns(UserWarning, match="checkpoint-00000001"),
        pytest.raises(CorruptFileError, match="every checkpoint in .* damaged"),
    ):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("step", ["mkdir", "write_tensors", "write_json", "seal", "replace", "sync_folder", "rename"])
def test_a_failure_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    save(tmp_path, 1, 2)

    def fail(*_args: object, **_options: object) -> None:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        if step in ("replace", "rename"):
            original = getattr(Path, step)
            patch.setattr(Path, step, lambda self, to: fail() if "checkpoint-" in self.name else original(self, to))
        elif step == "mkdir":
            patch.setattr(Path, step, lambda self, *_, **options: options or fail())
        else:
            patch.setattr(files if step.startswith("write") else checkpoints, step, fail)
        with pytest.raises(OSError, match="injected"):
            save(tmp_path, 3)
    assert checkpoints.load(tmp_path).state["number"] == (3 if step in ("sync_folder", "rename") else 2)
    save(tmp_path, 4)
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert checkpoints.load(tmp_path).state["number"] == 4
