"""The folder of a run: one whose configuration leaves settings out is continued where they are the defaults."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from lam import datasets
from lam.inputs import Preprocessing
from lam.runs.config_files import load_config
from lam.runs.folder import changed_parts, left_out, open_for_writing, refuse_other_run
from lam.runs.run import run

DEMO = "digits laplace_posthoc"


def begun(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def test_settings_left_out_count_as_defaults(tmp_path: Path) -> None:
    settings = load_config(DEMO).resolved()
    shorter = {name: value for name, value in settings.items() if name not in ("places", "accelerator")}
    shorter["method"] = {"name": "laplace_posthoc"}
    shorter["data"] = {**settings["data"], "ood": [{"name": found["name"]} for found in settings["data"]["ood"]]}
    refuse_other_run(begun(tmp_path / "run", shorter), settings)


def test_other_than_the_defaults_is_another_run(tmp_path: Path) -> None:
    settings = load_config("digits pfe", ["--method.epochs=3"]).resolved()
    with pytest.raises(ValueError, match=r"other settings \(method.epochs was 10, is 3\)"):
        refuse_other_run(begun(tmp_path / "run", {**settings, "method": "pfe"}), settings)


def test_a_setting_that_is_gone_is_another_run(tmp_path: Path) -> None:
    settings = load_config(DEMO).resolved()
    with pytest.raises(ValueError, match=r"other settings \(gone was 1, is None\)"):
        refuse_other_run(begun(tmp_path / "run", {**settings, "gone": 1}), settings)
    (tmp_path / "run" / "config.yaml").write_text("[1]")
    with pytest.raises(ValueError, match=r"other settings \(everything was \[1\], is"):
        refuse_other_run(tmp_path / "run", settings)


def test_a_place_that_cannot_be_written_is_refused_before_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    places = {"file/run": "file.*file", "folder/run": "user.*write"}
    monkeypatch.setattr("lam.runs.data.prepare_data", None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for place, why in places.items():
        with pytest.raises(ValueError, match=rf"{place} cannot be written, because .*{why}"):
            run(load_config(DEMO, [f"--output={tmp_path / place}"]), progress=False)


@pytest.mark.parametrize(("root", "inside"), [("images", "images/run"), (".", "runs/mine"), ("images/..", "run")])
def test_a_run_inside_its_folder_of_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, inside: str
) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"{inside} lies in .*: give another --output"):
        run(load_config("folder laplace_posthoc", [f"--data.root={root}", f"--output={inside}"]), progress=False)
    hidden = load_config("folder laplace_posthoc", [f"--data.root={root}", "--output=images/.runs/mine"])
    with pytest.raises(ValueError, match="no images"):
        run(hidden, progress=False)


def test_images_exchanged_under_their_names_are_other_data(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / "images" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(path)
    splits = datasets.load("folder", root=tmp_path / "images", preprocessing=Preprocessing(size=(8, 8)))
    folder, parts = tmp_path / "run", {"train": splits.train, "test": splits.test}
    for _ in range(2):
        with open_for_writing(folder, load_config(DEMO).resolved(), parts, splits):
            pass
    first, second = splits.train.files[:2]
    second.write_bytes(first.read_bytes())
    assert changed_parts(folder, parts) == ["train"]


def test_a_move_of_the_data_keeps_damaged_files_of_other_folders(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {root: /data/img}")
    (tmp_path / "damaged.csv").write_text("path,reason\n/data/img/a.png,cut\n/data/img2/b.png,cut\n")
    assert left_out(tmp_path, "/new") == {"/new/a.png", "/data/img2/b.png"}


def test_fingerprints_are_written_after_the_lists_so_that_no_list_is_lost(tmp_path: Path) -> None:
    splits, folder = datasets.load("digits"), tmp_path / "run"
    settings, parts = load_config(DEMO).resolved(), {"train": splits.train}

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_for_writing(folder, settings, parts, splits, killed):
        pass
    written: list[Path] = []
    for _ in range(2):  # the second start finds the fingerprints
        with open_for_writing(folder, settings, parts, splits, written.append):
            assert (folder / "data.json").is_file()
    assert written == [folder]


def test_other_soft_labels_are_other_data(tmp_path: Path) -> None:
    splits = datasets.load("digits")
    folder, test = tmp_path / "run", splits.test
    test.soft_labels = torch.eye(10)[test.labels]
    parts = {"train": splits.train, "test": test}
    with open_for_writing(folder, load_config(DEMO).resolved(), parts, splits):
        assert changed_parts(folder, parts) == []
    test.soft_labels = test.soft_labels.flip(1)
    assert changed_parts(folder, parts) == ["test"]
    test.soft_labels = None  # a calibration reads none
    assert changed_parts(folder, parts) == []
