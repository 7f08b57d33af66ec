"""Configurations: found, read, overridden, checked, and explained where they are wrong."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from lam.config import DataConfig, NetworkConfig, OodConfig, RunConfig
from lam.settings import describe_settings, find_config, load_config

DEMO = "configs/digits/laplace_posthoc.yaml"
SHIPPED = sorted(Path(str(files("lam") / "configs")).glob("*/*.yaml"))


def plain(**settings: Any) -> RunConfig:
    return replace(RunConfig(DataConfig("digits"), NetworkConfig("convnet8")), **settings)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_ships_is_valid(path: Path) -> None:
    load_config(path).check()


def test_the_configurations_at_the_root_are_those_that_ship() -> None:
    root = Path(__file__).parents[1] / "configs"
    if not root.exists():
        pytest.skip("not in a checkout: the link to the configurations is not packaged")
    assert not root.readlink().is_absolute()
    assert sorted(path.resolve() for path in root.glob("*/*.yaml")) == [path.resolve() for path in SHIPPED]


def test_a_configuration_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(DEMO) == find_config("digits/laplace_posthoc.yaml")
    (tmp_path / "mine.yaml").write_text("data: {name: digits}\nnetwork: {name: convnet8}\nmargin: 0.5\n")
    assert load_config("mine.yaml").margin == 0.5
    with pytest.raises(ValueError, match="there is no configuration no.yaml; lam ships configs/digits/laplace_online"):
        find_config("no.yaml")
    with pytest.raises(ValueError, match="is no run of lam: it has no config.yaml"):
        find_config(tmp_path)


def test_overrides_stand_above_the_file() -> None:
    config = load_config(DEMO, ["--training.epochs=7", "--data.options={held_out: [3]}", "--output=here"])
    assert (config.training.epochs, config.data.options, config.folder) == (7, {"held_out": [3]}, Path("here"))
    assert [found.name for found in config.data.ood] == ["digits_patches", "digits_held_out"]
    assert load_config(DEMO).folder == Path("runs/digits/laplace_posthoc")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--no.such=1", r"there is no setting --no.such=1; `lam run --help` lists the settings"),
        ("--training.epoch=1", "there is no setting --training.epoch=1"),
        ("extra", "there is no setting extra"),
        ("--training.loss=nice", "training.loss must be one of contrastive, log_posterior, squared, pml, got nice"),
        ("--laplace.split=x", "laplace.split must be one of euclidean, arccos, got x"),
        ("--laplace.fix=x", "laplace.fix must be one of positive, fixed, full, got x"),
        ("--margin=wide", "margin must be a number, got wide"),
        ("--margin", "margin needs a value, such as --margin=..."),
        ("--seed=1.5", "seed must be a whole number, got 1.5"),
        ("--data.limit=few", "data.limit must be a whole number or null, got few"),
        ("--data.ood=3", "data.ood must be a list of mappings, got 3"),
        ("--data.ood=[3]", "data.ood must be a list of mappings, got 3$"),
        ("--data.ood=[{root: here}]", "lacks data.ood.name"),
        ("--data.ood=[{name: mnist, root: no}]", "data.ood.root must be text or null, got False"),
        ("--data.ood=[{nam: x}]", "there is no setting data.ood.nam"),
        ("--data.options=3", "data.options must be a mapping, got 3"),
        ("--training.epochs=", "training.epochs must be a whole number, got nothing"),
        ("--training=fast", r"training is a section: give its settings by name, such as --training.NAME=VALUE"),
    ],
)
def test_a_wrong_setting_is_explained_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(DEMO, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: [", r"mine.yaml is not valid YAML: .* line"),
        ("hello", "mine.yaml is no configuration: it must hold settings"),
        ("", "mine.yaml is no configuration: it must hold settings"),
        ("network: {name: convnet8}", "mine.yaml lacks data.name"),
        ("data: {name: digits}\nnetwork: {name: x, size: 3}", "mine.yaml: there is no setting network.size"),
        ("data: {name: digits}\nnetwork: {name: x}\nmargn: 1", "there is no setting margn"),
    ],
)
def test_a_wrong_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(tmp_path / "mine.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("", {"margin": 2.5}, r"margin must be in \(0, 2\]"),
        ("", {"margin": 0.0}, r"margin must be in \(0, 2\]"),
        ("", {"margin": float("nan")}, r"margin must be in \(0, 2\]"),
        ("", {"seed": -1}, "seed must be at least 0, got -1"),
        ("", {"method": "magic"}, "method must be one of deterministic, .*, laplace_online, got 'magic'"),
        ("", {"accelerator": "abacus"}, "accelerator must be one of auto, cpu, cuda, got 'abacus'"),
        ("", {"accelerator": "mps"}, "accelerator must be one of auto, cpu, cuda, got 'mps'"),
        ("data", {"limit": 0}, "data.limit must be at least 1, got 0"),
        ("data", {"ood": [OodConfig("folder"), OodConfig("folder")]}, "2 sets called folder: give each its own title"),
        ("data", {"ood": [OodConfig("folder", title="a/b")]}, "must be letters, digits, .* got 'a/b'"),
        ("network", {"dimension": 1}, "network.dimension must be at least 2, got 1"),
        ("training", {"epochs": 0}, "training.epochs must be at least 1, got 0"),
        ("training", {"loss": "nice"}, "loss must be one of contrastive, .* got 'nice'"),
        ("training", {"learning_rate": 0.0}, "training.learning_rate must be positive and finite, got 0.0"),
        ("training", {"learning_rate_decay": 1.5}, r"training.learning_rate_decay must lie in \(0, 1\], got 1.5"),
        ("training", {"weight_decay": float("inf")}, "training.weight_decay must be at least 0, got inf"),
        ("training", {"precision": "8"}, "training.precision must be one of 32-true, .* got '8'"),
        ("training", {"optimizer": "lbfgs"}, "training.optimizer must be one of adam, .* got 'lbfgs'"),
        ("evaluation", {"n_samples": 1}, "evaluation.n_samples must be at least 2, got 1"),
        ("evaluation", {"reference": 2}, "evaluation.reference must be at least 5, got 2"),
    ],
)
def test_settings_outside_their_range_are_refused(section: str, settings: dict[str, Any], message: str) -> None:
    config = plain()
    for name, value in settings.items():
        setattr(getattr(config, section) if section else config, name, value)
    with pytest.raises(ValueError, match=message):
        config.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--laplace.split=x"], "laplace.split must be one of euclidean, arccos, got x"),
        (["--laplace.fix=x"], "laplace.fix must be one of .* got x"),
        (["--laplace.fix=full", "--laplace.pairs=dataset"], "laplace.fix must be fixed or positive with pairs"),
        (["--laplace.negative_weight=2"], r"laplace.negative_weight must be in \[0, 1\], got 2.0"),
        (["--laplace.prior_precision=-1"], "laplace.prior_precision must be positive and finite, got -1.0"),
        (["--laplace.likelihood_scale=0"], "laplace.likelihood_scale must be positive and finite, got 0.0"),
        (["--laplace.batch_size=1"], "laplace.batch_size must be at least 2, got 1"),
        (["--laplace.tune=x"], "laplace.tune must be one of calibration, marginal_likelihood, none, got x"),
        (["--online.memory_factor=1"], r"online.memory_factor must be in \(0, 1\), got 1.0"),
    ],
)
def test_options_of_a_method_outside_their_range_are_refused_with_their_section(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("configs/digits/laplace_posthoc.yaml", settings)


def test_an_accelerator_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="accelerator cuda is not available here: take auto or cpu"):
        plain(accelerator="cuda").check()


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert "training.loss                 contrastive  (contrastive, log_posterior, squared, pml)" in described
    assert "data.name                     required" in described
    assert "laplace.likelihood_scale      none" in described
