"""A Laplace run that starts from a run with a κ head: it keeps the head, and has κ_a and κ_e everywhere."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lam.cli import main
from lam.datasets import TensorImages
from lam.encoders.bayesian import BayesianEncoder
from lam.hessians import InfoNCECurvature, VarConCurvature
from lam.losses import MCInfoNCE
from lam.methods.base import curvature_of_loss
from lam.models.kappa_head import KappaHead
from lam.runs.config_files import load_config
from lam.runs.finished import Run
from lam.runs.plan import Plan, Start
from lam.runs.run import run
from lam.service.engine import Engine
from lam.training import History
from lam.tuning.ambiguity import FORMS, TrainedHead
from tests.conftest import tiny
from tests.service.asking import PNG, client_of

QUICK = ["--training.epochs=1", "--accelerator=cpu", "--evaluation.corrupted=5", "--evaluation.n_samples=8", "--quiet"]


def made(folder: Path, method: str, *settings: str) -> Path:
    assert main(["run", "digits", method, *QUICK, *settings, f"--output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["--method.epochs=1", "--method.n_samples=4"]
    return made(tmp_path_factory.mktemp("start") / "mcinfonce", "mcinfonce", *settings)


@pytest.fixture(scope="module")
def second(first: Path) -> Path:
    options = [f"--checkpoint={first}", "--method.curvature=own", "--ambiguity.reference=200"]
    return made(first.parent / "laplace", "laplace_posthoc", *options)


def images(n: int = 12) -> torch.Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.long
def test_network_curvature_and_kappa_head_are_those_of_the_run_that_it_starts_from(first: Path, second: Path) -> None:
    source, encoder = Run(first).encoder, Run(second).encoder
    assert isinstance(encoder, BayesianEncoder)
    assert encoder.ambiguity is not None
    assert isinstance(encoder.ambiguity.head, TrainedHead)
    before, own = (dict(each.network.state_dict()) for each in (source, encoder) if each.network is not None)
    assert all(torch.equal(value, own[name]) for name, value in before.items())
    temperature = MCInfoNCE(20.0).curvature(encoder.dimension, 20.0)["temperature"]
    assert encoder.posterior.curvature.curvature == InfoNCECurvature(temperature)
    embeddings = encoder.embed(images())
    assert embeddings.kappa_aleatoric is not None
    assert embeddings.kappa_epistemic is not None
    torch.testing.assert_close(embeddings.kappa_aleatoric, source.embed(images()).kappa, rtol=1e-4, atol=1e-4)
    assert not torch.equal(embeddings.kappa_epistemic, embeddings.kappa)
    metrics = json.loads((second / "metrics.json").read_text())
    assert "seconds_train" not in metrics
    assert all(f"ausc_{part}" in metrics for part in ("kappa_epistemic", "kappa_aleatoric", "p_known"))


@pytest.mark.long
def test_a_posterior_hands_the_kappa_head_on(second: Path, tmp_path: Path) -> None:
    third: Any = Run(made(tmp_path / "third", "laplace_posthoc", f"--checkpoint={second}")).encoder
    expected = Run(second).encoder.embed(images()).kappa_aleatoric
    torch.testing.assert_close(third.embed(images()).kappa_aleatoric, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_kappa_head_is_the_same_after_it_was_part_of_an_ambiguity(form: Any) -> None:
    head, features = KappaHead(7, 5, form=form, start=9.0), torch.randn(20, 7)
    again = TrainedHead.of(head).kappa_head()
    assert torch.equal(again(features), head(features))


@pytest.mark.long
def test_it_is_exported_and_served_with_both_parts(second: Path, tmp_path: Path) -> None:
    encoder: Any = Run(second).encoder
    embeddings = encoder.embed(images())
    encoder.export(tmp_path / "encoder.pt2")
    outputs = torch.export.load(tmp_path / "encoder.pt2").module()(images())
    expected = (embeddings.kappa_epistemic, embeddings.kappa_aleatoric, embeddings.p_known)
    for actual, part in zip(outputs[4:], expected, strict=True):
        torch.testing.assert_close(actual, part, rtol=1e-4, atol=1e-4)
    with closing(Engine(second)) as engine, client_of(engine) as client:
        answer = client.post("/v1/search", content=Run(second).samples[0].image, headers=PNG).json()
    assert answer["kappa_aleatoric"] > 0
    assert answer["kappa_epistemic"] > 0
    assert 0 <= answer["p_known"] <= 1


@pytest.mark.long
def test_what_the_loss_of_a_run_learned_is_part_of_the_curvature(tmp_path: Path) -> None:
    first = made(tmp_path / "varcon", "varcon", "--training.optimizer=sgd")
    second = made(tmp_path / "laplace", "laplace_posthoc", f"--checkpoint={first}", "--method.curvature=own")
    learned = json.loads((first / "training.json").read_text())["network"]["learned"]["epsilon"][0]
    encoder: Any = Run(second).encoder
    assert encoder.posterior.curvature.curvature == VarConCurvature(0.1, learned)
    assert encoder.ambiguity is None
    between = made(tmp_path / "norm", "norm", f"--checkpoint={first}")  # this method trains nothing
    third = made(tmp_path / "third", "laplace_posthoc", f"--checkpoint={between}", "--method.curvature=own")
    handed_on: Any = Run(third).encoder
    assert handed_on.posterior.curvature.curvature == encoder.posterior.curvature.curvature


def test_a_run_that_trained_no_network_hands_on_what_it_started_with(tmp_path: Path) -> None:
    plan, start = Plan(tiny(tmp_path, "--checkpoint=first")), Start({"name": "infonce", "temperature": 0.3})
    assert plan.trained_by(start, {}) == start.trained_by
    trained = History((1.0,), (), (1.0,), 1, 0)
    for of_start, histories in ((start, {"network": trained}), (Start(), {})):
        assert plan.trained_by(of_start, histories) == curvature_of_loss(plan.loss)


def test_a_kappa_head_is_left_out_where_too_few_items_have_a_match_or_nothing_is_to_be_learned(tmp_path: Path) -> None:
    start = Start({"name": "infonce", "temperature": 0.3}, KappaHead(4))

    def taken_over(n: int, *settings: str) -> Start:
        items = TensorImages(torch.rand(n, 1, 4, 4), torch.arange(n) % 4)
        return Plan(tiny(tmp_path, "--checkpoint=first", *settings)).checked(start, items)

    assert taken_over(20) == taken_over(20, "--ambiguity.learn=true") == start
    without = replace(start, kappa_head=None)
    with pytest.warns(UserWarning, match="κ head of .*first.*match, got 12"):
        assert taken_over(12) == without
    assert taken_over(12, "--ambiguity.learn=false") == taken_over(20, "--ambiguity.learn=false") == without
    with pytest.raises(ValueError, match="20 items.*match, got 12"):
        taken_over(12, "--ambiguity.learn=true")


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_a_run_that_cannot_be_started_from_is_refused_before_any_work(first: Path, tmp_path: Path) -> None:
    for settings, message in (
        ([f"--checkpoint={first.parent}"], f"{first.parent} .*run of lam; "),
        ([f"--checkpoint={first}", "--network.dimension=5"], "checkpoint .*mcinfonce: .*differs.*--network.name="),
    ):
        with pytest.raises(ValueError, match=message):
            run(tiny(tmp_path / "run", *settings), progress=False)
        assert not (tmp_path / "run").exists()
    unfinished = Path(shutil.copytree(first, tmp_path / "unfinished"))
    (unfinished / "MANIFEST.json").unlink()
    with pytest.raises(ValueError, match="has not finished"):
        run(tiny(tmp_path / "run", f"--checkpoint={unfinished}"), progress=False)


@pytest.mark.long
def test_a_run_of_several_networks_is_refused(tmp_path: Path) -> None:
    ensemble = made(tmp_path / "ensemble", "deep_ensemble", "--method.n_members=2")
    config = load_config("digits laplace_posthoc", [f"--checkpoint={ensemble}", f"--output={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="deep_ensemble,? .*several networks"):
        run(config, progress=False)
