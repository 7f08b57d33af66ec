"""Configurations: found, read, overridden, checked, and explained where they are wrong."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from lam.methods.deep_ensemble import EnsembleOptions
from lam.runs.config import DataConfig, NetworkConfig, OodConfig, RunConfig, completed
from lam.runs.config_files import describe_settings, find_config, load_config

DEMO = "configs/digits/laplace_posthoc.yaml"
SHIPPED = sorted(Path(str(files("lam") / "configs")).glob("*/*.yaml"))


def plain(**settings: Any) -> RunConfig:
    return replace(RunConfig(DataConfig("digits"), NetworkConfig("convnet8")), **settings)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_ships_is_valid(path: Path) -> None:
    load_config(path).check()


def test_the_configurations_at_the_root_are_those_that_ship() -> None:
    root = Path(__file__).parents[2] / "configs"
    if not root.exists():
        pytest.skip("not in a checkout: the link to the configurations is not packaged")
    assert not root.readlink().is_absolute()
    assert sorted(path.resolve() for path in root.glob("*/*.yaml")) == [path.resolve() for path in SHIPPED]


def test_a_configuration_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(DEMO) == find_config("digits/laplace_posthoc.yaml")
    (tmp_path / "mine.yaml").write_text("data: {name: digits}\nnetwork: {name: convnet8}\nmargin: 0.5\n")
    assert load_config("mine.yaml").margin == 0.5
    ships = r"lam ships configs/DATA/METHOD.yaml, such as configs/digits/\w+.yaml; DATA is cifar10, .*, places"
    with pytest.raises(ValueError, match=f"there is no configuration no.yaml; {ships}"):
        find_config("no.yaml")
    with pytest.raises(ValueError, match="no configuration configs/places/pfe.yaml; lam ships configs/places/determ"):
        find_config("configs/places/pfe.yaml")
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
        (["--deep_ensemble.n_members=1"], "deep_ensemble.n_members must be at least 2, got 1"),
        (["--deep_ensemble.checkpoints=[a, b]"], "deep_ensemble.checkpoints must be none, or one file for each"),
        (["--deep_ensemble.checkpoints=3"], "deep_ensemble.checkpoints must be a list, got 3"),
        (["--pfe.epochs=0"], "pfe.epochs must be at least 1, got 0"),
        (["--pfe.shared=perhaps"], "pfe.shared must be true or false, got perhaps"),
        (["--hib.kl_weight=-1"], "hib.kl_weight must be at least 0, got -1.0"),
        (["--knn_distance.k=0"], "knn_distance.k must be at least 1, got 0"),
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["size=32"], {"size": 32}),
        (["size=[32,48]"], {"size": [32, 48]}),
        (["size=32", "mode=L"], {"size": 32, "mode": "L"}),
        (["mean=[0.5]", "size=null"], {"mean": [0.5], "size": None}),
    ],
)
def test_options_below_options_are_read_as_yaml(overrides: list[str], expected: dict[str, Any]) -> None:
    given = [f"--data.options.preprocessing.{override}" for override in overrides]
    config = load_config("configs/folder/laplace_posthoc.yaml", given)
    assert config.data.options == {"preprocessing": expected}


def test_one_set_of_outsiders_needs_no_list(tmp_path: Path) -> None:
    folder = tmp_path / "other birds"
    folder.mkdir()
    for value, expected in (
        (str(folder), OodConfig("folder", str(folder), title="other-birds")),
        ("mnist", OodConfig("mnist")),
        ("[{name: mnist, root: here}]", OodConfig("mnist", "here")),
    ):
        config = load_config("configs/folder/laplace_posthoc.yaml", ["--data.root=x", f"--data.ood={value}"])
        assert config.data.ood == [expected]
        config.check()


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert "training.loss                 contrastive  (contrastive, log_posterior, squared, pml)" in described
    assert "data.name                     required" in described
    assert "laplace.likelihood_scale      none" in described


def test_options_are_those_of_the_method() -> None:
    config = plain()
    assert plain(method="laplace_posthoc").options is not None
    for method in ("laplace_posthoc", "laplace_online", "deep_ensemble", "pfe", "hib", "knn_distance"):
        assert type(replace(config, method=method).options).__module__ == f"lam.methods.{method}"
    assert plain(method="norm").options is None


def test_an_ensemble_starts_from_a_file_for_each_member_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one network and a deep ensemble has 5: .*--deep_ensemble.checkpoints"):
        plain(method="deep_ensemble", checkpoint="trained.pth").check()
    options = EnsembleOptions(n_members=2, checkpoints=[str(tmp_path / "a.pth"), str(tmp_path / "b.pth")])
    with pytest.raises(ValueError, match="deep_ensemble.checkpoints: .*a.pth does not exist"):
        plain(method="deep_ensemble", deep_ensemble=options).check()


class TestExtends:
    """A file that says only what differs from another."""

    def write(self, folder: Path, **contents: str) -> None:
        for name, content in contents.items():
            (folder / f"{name}.yaml").write_text(content)

    def test_joins_sections_and_replaces_the_rest(self, tmp_path: Path) -> None:
        base = "data: {name: cifar10, options: {validation: 9}, ood: [{name: svhn}]}\nnetwork: {name: convnet32}\n"
        middle = "extends: base.yaml\ntraining: {epochs: 7, batch_size: 8}\nonline: {memory_factor: 0.5}\n"
        top = (
            "extends: middle.yaml\nmethod: hib\ntraining: {epochs: 9}\n"
            "data: {options: {download: true}, ood: [{name: cifar10}]}\n"
        )
        self.write(tmp_path, base=base, middle=middle, top=top)
        config = load_config(tmp_path / "top.yaml", ["--training.loss=pml"])
        assert (config.method, config.network.name, config.online.memory_factor) == ("hib", "convnet32", 0.5)
        assert (config.training.epochs, config.training.batch_size, config.training.loss) == (9, 8, "pml")
        assert config.data.options == {"validation": 9, "download": True}
        assert config.data.ood == [OodConfig("cifar10")]
        assert "extends" not in config.resolved()

    def test_finds_what_ships(self, tmp_path: Path) -> None:
        self.write(tmp_path, mine=f"extends: {DEMO}\nmargin: 0.5\n")
        assert load_config(tmp_path / "mine.yaml") == replace(load_config(DEMO), margin=0.5)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("extends: no.yaml", "mine.yaml: extends: there is no configuration no.yaml; lam ships"),
            ("extends: [a.yaml]", r"mine.yaml: extends must be the name of one file, got \['a.yaml'\]"),
            ("extends: mine.yaml", "mine.yaml: extends: mine.yaml extends this file itself"),
            ("extends: back.yaml", "back.yaml: extends: mine.yaml extends this file itself"),
            ("extends: broken.yaml", "broken.yaml is not valid YAML"),
        ],
    )
    def test_what_is_wrong_is_named(self, content: str, message: str, tmp_path: Path) -> None:
        self.write(tmp_path, mine=content, back="extends: mine.yaml", broken="data: [")
        with pytest.raises(ValueError, match=message) as caught:
            load_config(tmp_path / "mine.yaml")
        assert "\n" not in str(caught.value)


class TestAllowMissing:
    """The short form sets the option wherever there is one."""

    def test_of_the_data_and_of_the_ood_sets(self) -> None:
        overrides = [
            "--data.name=cub200",
            "--data.options={validation: 0.3}",
            "--data.ood=[{name: cars196}, {name: svhn}]",
        ]
        config = load_config(DEMO, overrides, allow_missing=True)
        assert config.data.options == {"validation": 0.3, "allow_missing": True}
        assert [found.options for found in config.data.ood] == [{"allow_missing": True}, {}]

    def test_of_data_without_lists_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match="--allow-missing is of no use: the files of digits are not named in a list"
        ):
            load_config(DEMO, allow_missing=True)

    def test_leaves_a_name_that_is_none_to_the_run(self) -> None:
        overrides = ["--data.name=lfw", "--data.ood=[{name: nothing}]"]
        assert load_config(DEMO, overrides, allow_missing=True).data.ood == [OodConfig("nothing")]


def test_settings_of_an_older_version_are_completed_by_defaults() -> None:
    config = plain(margin=0.5)
    config.data.ood = [OodConfig("mnist", root="here")]
    resolved = config.resolved()
    older = {name: value for name, value in resolved.items() if name not in ("online", "accelerator")}
    older["data"] = {"name": "digits", "ood": [{"name": "mnist", "root": "here"}], "gone": 3}
    assert completed(older) == {**resolved, "data": {**resolved["data"], "gone": 3}}
    assert completed({"margin": 0.5}).keys() == resolved.keys() - {"data", "network"}
    assert completed({"data": None})["data"] is None
