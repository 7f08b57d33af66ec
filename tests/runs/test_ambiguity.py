"""A run whose encoder learns its ambiguity, from the configuration to the output of `lam search` and `lam embed`."""

import html
import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam.cli import main
from lam.runs.finished import Run
from lam.service.engine import Engine
from lam.tuning.ambiguity import SEVERAL, UNSEEN
from tests.helpers import written_hits
from tests.runs.conftest import Lam
from tests.service.asking import PNG, client_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ambiguity") / "run"
    settings = ["--ambiguity.learn=true", "--ambiguity.reference=200", "--training.epochs=1", "--accelerator=cpu"]
    settings += ["--evaluation.corrupted=5", "--evaluation.n_samples=8", f"--output={folder}", "--quiet"]
    assert main(["run", "digits", "laplace_posthoc", *settings]) == 0
    return folder


def test_its_scores_are_measured_and_its_encoder_has_learned(folder: Path) -> None:
    metrics = json.loads((folder / "metrics.json").read_text())
    for score in ("kappa_epistemic", "kappa_aleatoric", "p_known"):
        assert 0 <= metrics[f"ausc_{score}"] <= 1
        assert 0 <= metrics[f"auroc_{score}"] <= 1
    assert "seconds_ambiguity" in metrics
    assert Run(folder).encoder.ambiguity is not None


def test_the_report_says_which_part_of_kappa_says_what(folder: Path) -> None:
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    for said in (f"p_known means “{UNSEEN}”", f"κ of ambiguity means “{SEVERAL}”"):
        share = re.search(rf"{said}: ([\d.]+)% of queries, ([\d.]+)% of digits_patches", page)
        assert share is not None
        assert all(0 <= float(number) <= 100 for number in share.groups())


def test_the_service_says_which_it_is(folder: Path) -> None:
    with closing(Engine(folder)) as engine, client_of(engine) as client:
        answers = [
            client.post("/v1/search", content=sample.image, headers=PNG).json() for sample in Run(folder).samples
        ]
    assert {answer["doubt"] for answer in answers} <= {"", UNSEEN, SEVERAL}
    assert answers[-1]["doubt"] == UNSEEN  # the stranger
    assert all(0 <= answer["p_known"] <= 1 and answer["kappa_aleatoric"] > 0 for answer in answers)


def test_search_and_embed_say_which_it_is(folder: Path, tmp_path: Path, lam: Lam) -> None:
    noise = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)).mul(255).byte().numpy()
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.fromarray(noise).save(pictures / "noise.png")
    said = lam("search", folder, pictures / "noise.png", "--quiet").out.splitlines()[1]
    assert any(words in said for words in (UNSEEN, SEVERAL, "neither unseen nor ambiguous"))
    assert "p_known" in said
    written, (row, *_) = written_hits(folder, str(pictures))
    entry = written["images"][0]
    assert float(row["p_known"]) == entry["p_known"]
    assert row["doubt"] == entry["doubt"]
    lam("embed", folder, pictures, "-o", tmp_path / "made.npz", "--quiet")
    made = np.load(tmp_path / "made.npz")
    assert made["p_known"][0] == pytest.approx(entry["p_known"])
    assert made["kappa_aleatoric"].shape == made["kappa_epistemic"].shape == (1,)
    lam("index", folder, "--embeddings", tmp_path / "made.npz", "--quiet")
