"""Configurations: finding, reading, overriding and checking them, and errors."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lam import experiments
from lam.methods import METHODS, DeepEnsemble, Hib, LaplaceOnline, LaplacePosthoc
from lam.runs.config import DataConfig, NetworkConfig, OodConfig, RunConfig, TrainingConfig
from lam.runs.config_files import SHIPPED, describe_settings, load_config

DEMO = "digits laplace_posthoc"


def write(folder: Path, **contents: str) -> None:
    for name, content in contents.items():
        (folder / f"{name}.yaml").write_text(content)


def plain(**settings: Any) -> RunConfig:
    return replace(RunConfig(DataConfig("digits"), NetworkConfig("convnet8"), LaplacePosthoc()), **settings)


def test_the_configurations_at_the_root_are_those_that_ship() -> None:
    root = Path(__file__).parents[2] / "configs"
    if not root.exists():
        pytest.skip("not in a checkout: the link to the configurations is not packaged")
    assert not root.readlink().is_absolute()
    assert sorted(path.resolve() for path in root.glob("*/*.yaml")) == sorted(SHIPPED.resolve().glob("*/*.yaml"))


def test_a_configuration_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # not a run, so the name means the data set
    assert load_config(DEMO) == load_config(DEMO.split())
    mine = "data: {name: digits}\nnetwork: {name: convnet8}\nmethod: hib\nmargin: 0.5\n"
    (tmp_path / "my own.yaml").write_text(mine)
    config = load_config("my own.yaml")
    assert (config.margin, config.method, config.output) == (0.5, Hib(), None)
    assert load_config(Path("my own.yaml")) == config
    ships = "DATA METHOD.*YAML.*folder.*DATA is banking77, .*texts; METHOD is determ"
    for name, message in (
        ("no.yaml", f"no configuration no.yaml: .*{ships}"),
        ("", "no configuration : "),
        ("places pef", "method.*deterministic, .*laplace_online.*'pef'"),
        (["digits"], "digits.*`lam run digits METHOD`; METHOD is deterministic, "),
        ("digits norm paper", "no setting paper"),
        (tmp_path, "no config.yaml; .*`lam run folder METHOD --data.root="),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(name)


def test_the_authors_settings_are_refused_where_they_have_none() -> None:
    with pytest.raises(ValueError, match="no settings for digits; .*cifar10, .*, msls$"):
        load_config("digits norm --paper")
    with pytest.raises(ValueError, match="hib on lfw; .*deterministic, .*, laplace_online$"):
        load_config("lfw hib --paper")
    with pytest.raises(ValueError, match="--paper is for cifar10, cub200, fashionmnist, lfw, msls, got mine.yaml"):
        load_config("mine.yaml hib --paper")


def test_overrides_stand_above_the_file() -> None:
    config = load_config(DEMO, ["--training.epochs=7", "--data.options={held_out: [3]}", "--output=here"])
    assert (config.training.epochs, config.data.options, config.folder) == (7, {"held_out": [3]}, Path("here"))
    assert [found.name for found in config.data.ood] == ["digits_patches", "digits_held_out"]
    assert load_config(DEMO).folder == Path("runs/digits/laplace_posthoc")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--no.such=1", "no setting no; .*`lam run --help`"),
        ("--training.epoch=1", r"no setting training.epoch; .*training.epochs\?"),
        ("--epochs=1", r"mean training.epochs\?"),
        ("extra", "no setting extra"),
        ("--method.split.x=1", "no setting method.split.x: .*not a section"),
        ("--method.n_samples=1", "no setting method.n_samples; .*`lam run --help`"),
        ("--method=magic", "method.*deterministic, .*laplace_online.*'magic'"),
        ("--method=3", "method.*name.*mapping.*got 3"),
        ("--training.loss=nice", "training.loss.*contrastive, .*aninfonce, got 'nice'"),
        ("--method.split=x", "method.split.*'euclidean' or 'arccos'.*'x'"),
        ("--method.fix=x", "method.fix.*'positive', 'fixed', 'full' or 'projected'.*'x'"),
        ("--margin=wide", "margin: .*'wide'"),
        ("--margin", "margin.*--margin=..."),
        ("--margin=[1", r"margin: \[1.*YAML: "),
        ("--seed=1.5", "seed: .*1.5"),
        ("--accelerator=mps", "accelerator: .*'auto', 'cpu' or 'cuda', .*'mps'"),
        ("--data.limit=few", "data.limit: .*'few'"),
        ("--data.gallery=people", "data.gallery.*'classes' or 'identities'.*'people'"),
        ("--data.ood=3", "data.ood: .*got 3"),
        ("--data.ood=[3]", "data.ood.0: .*got 3$"),
        ("--data.ood=[{root: here}]", "data.ood.0.name: Field required"),
        ("--data.ood=[{name: mnist, root: no}]", "data.ood.0.root: .*False"),
        ("--data.ood=[{nam: x}]", "no setting data.ood.0.nam"),
        ("--data.options=3", "data.options: .*got 3"),
        ("--training.epochs=", "training.epochs: .*None"),
        ("--training=fast", "training.*training.epochs.*'fast'"),
        ("--ambiguity=true", "ambiguity.*ambiguity.learn.*True"),
        ("--seed=-1", "^seed.*0.*-1"),
        ("--data.seed=-1", "^data.seed.*0.*-1"),
        ("--data.limit=0", "^data.limit.*1.*0"),
        ("--data.num_workers=-1", "^data.num_workers.*0.*-1"),
        ("--data.strangers=1", r"^data.strangers.*\[0, 1\), got 1"),
        ("--data.strangers=-0.1", r"^data.strangers.*\[0, 1\), got -0.1"),
        ("--data.ood=[{name: folder}, {name: folder}]", "^data.ood.*2 sets.*folder.*title"),
        ("--data.ood=[{name: folder, title: a/b}]", "^data.ood.0.title must be letters, digits, .* got 'a/b'"),
        ("--data.ood=[{name: folder, title: unseen}]", "^data.ood.0.title.*unseen"),
        ("--data.options={root: images}", "^data.options.*root: .*data.root"),
        ("--data.ood=[{name: digits, options: {seed: 1}}]", "^data.ood.0.options.*seed: .*data.seed$"),
        ("--network.options={seed: 1}", "^network.options.*seed: .*seed$"),
        ("--network.options={name: x}", "^network.options.*name: .*network.name$"),
        ("--network.dimension=1", "^network.dimension.*2.*1"),
        ("--training.temperature=0", "^training.temperature.*0"),
        ("--training.epochs=0", "training.epochs.*1.*0"),
        ("--training.learning_rate=0.0", "training.learning_rate.*0.0"),
        ("--training.learning_rate_decay=1.5", r"training.learning_rate_decay.*\(0, 1\].*1.5"),
        ("--training.weight_decay=.inf", "training.weight_decay.*0.*inf"),
        ("--training.precision=8", "training.precision.*'32-true'.*8"),
        ("--training.optimizer=lbfgs", "training.optimizer.*'adam'.*'lbfgs'"),
        ("--places.relevant_within=0", "^places.relevant_within.*0"),
        ("--places.negative_beyond=1", "^places.negative_beyond.*10.*1"),
        ("--places.angle_within=20", "places.angle_within.*data's angles"),
        ("--data.options={angles: true}", "places.angle_within.*data's angles"),
        ("--evaluation.n_samples=1", "^evaluation.n_samples.*2.*1"),
        ("--evaluation.reference=2", "^evaluation.reference.*5.*2"),
        ("--evaluation.corrupted=-1", "^evaluation.corrupted.*0.*-1"),
        ("--ambiguity.reference=-1", "^ambiguity.reference.*0.*-1"),
    ],
)
def test_a_wrong_setting_is_explained_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(DEMO, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: [", "mine.yaml is not.*YAML: .* line"),
        ("hello", "mine.yaml.*not a configuration"),
        ("", "mine.yaml.*not a configuration"),
        ("network: {name: convnet8}", "mine.yaml: method.name is missing; known are deterministic, "),
        ("method: hib\nnetwork: {name: convnet8}", "mine.yaml: data: Field required"),
        ("method: hib\ndata: {name: digits}\nnetwork: {name: x, size: 3}", "mine.yaml.*no setting network.size"),
        ("method: hib\ndata: {name: digits}\nnetwork: {name: x}\nmargn: 1", "no setting margn"),
        ("method: hib\nmethods: [1]", "mine.yaml: methods.*section.*got"),
        ("method: [hib]", r"method.*name.*mapping.*\['hib'\]"),
        ("extends: no.yaml", "mine.yaml: extends.*no configuration no.yaml.*DATA METHOD"),
        ("extends: [a.yaml]", r"mine.yaml: extends must.*\['a.yaml'\]"),
        ("extends: digits", r"mine.yaml: extends.*digits\?"),
        ("extends: mine.yaml", "mine.yaml: extends: mine.yaml extends"),
        ("extends: back.yaml", "back.yaml: extends: mine.yaml extends"),
        ("extends: broken.yaml", "broken.yaml.*valid YAML"),
    ],
)
def test_a_wrong_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, mine=content, back="extends: mine.yaml", broken="data: [")
    with pytest.raises(ValueError, match=message) as caught:
        load_config(tmp_path / "mine.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("margin", [2.5, 0.0, float("nan")])
def test_a_margin_outside_its_range_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match=r"margin.*\(0, 2\]"):
        plain(margin=margin).check()


def test_a_record_made_in_python_checks_itself() -> None:
    with pytest.raises(ValueError, match="dimension.*2.*1"):
        NetworkConfig("convnet8", 1)
    with pytest.raises(ValueError, match="title.*unseen"):
        replace(OodConfig("folder"), title="unseen")
    with pytest.raises(ValueError, match="loss.*contrastive, .*'nice': .*lam.losses"):
        TrainingConfig(loss="nice")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("laplace_posthoc", "fix=full pairs=dataset", "method.pairs.*batch for"),
        ("laplace_posthoc", "negative_weight=2", r"method.negative_weight.*\[0, 1\].*2.0"),
        ("laplace_posthoc", "prior_precision=-1", "method.prior_precision.*-1.0"),
        ("laplace_posthoc", "batch_size=1", "method.batch_size.*2.*1"),
        ("laplace_posthoc", "tune=x", "method.tune.*'calibration', 'marginal_likelihood' or 'none'"),
        ("deep_ensemble", "checkpoints=[a,b]", "method.checkpoints.*empty.*file for each"),
        ("deep_ensemble", "checkpoints=3", "method.checkpoints: .*got 3"),
        ("pfe", "shared=perhaps", "method.shared: .*'perhaps'"),
    ],
)
def test_options_of_a_method_outside_their_range_are_refused_with_their_section(
    method: str, settings: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(f"digits {method}", [f"--method.{setting}" for setting in settings.split()])


def test_an_accelerator_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="accelerator cuda.*auto or cpu"):
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
    config = load_config("folder laplace_posthoc", ["--network.name=resnet18", *given])
    assert config.data.options == {"preprocessing": expected}


def test_one_ood_set_needs_no_list(tmp_path: Path) -> None:
    folder = tmp_path / "other birds"
    folder.mkdir()
    for value, expected in (
        (str(folder), OodConfig("folder", str(folder), title="other-birds")),
        ("mnist", OodConfig("mnist")),
        ("[{name: mnist, root: here}]", OodConfig("mnist", str(Path("here").absolute()))),
    ):
        config = load_config(
            "folder laplace_posthoc", ["--network.name=resnet18", "--data.root=x", f"--data.ood={value}"]
        )
        assert config.data.ood == [expected]
        config.check()


def test_every_setting_is_described() -> None:
    described = describe_settings()
    entries = re.sub(r"\n {4,}", " ", f"{described}\n{experiments.describe_settings()}").splitlines()
    assert [each for each in entries if not re.fullmatch(r"  of \w.*:|  \S+ +\S.*: \S.*", each)] == []
    assert "training.loss                 contrastive  (contrastive, log_posterior, squared, pml, supcon, " in described
    assert "data.name                     required" in described
    assert "method.likelihood_scale       null" in described
    by_default, config = (load_config("digits hib", each) for each in ([], ["--data.limit=null", "--data.root=null"]))
    assert config == by_default
    assert "method.name                   required  (deterministic, " in described
    assert all(f"  of {name}:\n" in described for name in ("hib", "laplace_online", "deep_ensemble"))


def test_the_home_folder_is_found_after_an_equals_sign_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["--output=~/run", "--checkpoint=~/net.pth", "--data.soft_labels=~/people.npy", "--data.root=a~/b"]
    config = load_config(DEMO, [*overrides, "--data.ood=[{name: folder, root: ~/strange}]"])
    assert config.folder == tmp_path / "run"
    assert config.checkpoint == str(tmp_path / "net.pth")
    assert config.data.soft_labels == str(tmp_path / "people.npy")
    assert config.data.ood[0].root == str(tmp_path / "strange")
    assert config.data.root == str(Path("a~/b").absolute())


def test_text_stays_text() -> None:
    for value in ("007", "2026-11-22", "no", "a: b: [", "[x]"):
        assert load_config(DEMO, [f"--output={value}"]).output == value
    assert load_config(DEMO, ["--data.root=null"]).data.root is None


def test_a_method_that_overrides_takes_no_options_of_another(tmp_path: Path) -> None:
    assert load_config(DEMO, ["--method=hib"]) == load_config("digits hib")
    assert load_config(DEMO, ["--method.name=hib", "--method.n_samples=3"]).method == Hib(n_samples=3)
    assert load_config(DEMO, ["--method={name: hib, n_samples: 3}"]).method == Hib(n_samples=3)
    (tmp_path / "mine.yaml").write_text(
        "extends: digits hib\nmethod: {name: hib, n_samples: 4}\nmethods: {pfe: {margin: 0.5}}\n"
    )
    assert load_config(tmp_path / "mine.yaml").method == Hib(n_samples=4)
    assert load_config([str(tmp_path / "mine.yaml"), "pfe"]).margin == 0.5
    with pytest.raises(ValueError, match="no setting method.n_samples"):
        load_config(tmp_path / "mine.yaml", ["--method={name: pfe, n_samples: 3}"])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_written_back_with_its_name_and_every_option(name: str) -> None:
    config = load_config(f"digits {name}")
    section = config.resolved()["method"]
    assert section["name"] == name
    assert RunConfig.parsed(config.resolved()).resolved() == config.resolved()
    assert section.keys() == {"name", *(option.name for option in fields(METHODS[name]))}


def test_an_ensemble_starts_from_a_file_for_each_member_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 files.*--method.checkpoints"):
        plain(method=DeepEnsemble(), checkpoint="trained.pth").check()
    members = DeepEnsemble(n_members=2, checkpoints=[str(tmp_path / "a.pth"), str(tmp_path / "b.pth")])
    with pytest.raises(ValueError, match="checkpoint .*a.pth.*not exist"):
        plain(method=members).check()
    (tmp_path / "a.pth").mkdir()
    with pytest.raises(ValueError, match="checkpoint .*a.pth is a folder.*RUN/encoder"):
        plain(method=members).check()


class TestExtends:
    """A file with only the differences from another file."""

    def test_joins_sections_and_replaces_the_rest(self, tmp_path: Path) -> None:
        base = "data: {name: cifar10, options: {validation: 9}, ood: [{name: svhn}]}\nnetwork: {name: convnet32}\n"
        middle = "extends: base.yaml\ntraining: {epochs: 7, batch_size: 8}\nmethod: {name: laplace_online, head: fc}\n"
        top = (
            "extends: middle.yaml\nmethod: {memory_factor: 0.5}\ntraining: {epochs: 9}\n"
            "data: {options: {download: true}, ood: [{name: cifar10}]}\n"
        )
        write(tmp_path, base=base, middle=middle, top=top)
        config = load_config(tmp_path / "top.yaml", ["--training.loss=pml"])
        assert (config.method, config.network.name) == (LaplaceOnline(head="fc", memory_factor=0.5), "convnet32")
        assert (config.training.epochs, config.training.batch_size, config.training.loss) == (9, 8, "pml")
        assert config.data.options == {"validation": 9, "download": True}
        assert config.data.ood == [OodConfig("cifar10")]
        assert "extends" not in config.resolved()

    def test_finds_what_ships(self, tmp_path: Path) -> None:
        write(tmp_path, mine=f"extends: {DEMO}\nmargin: 0.5\n")
        assert load_config(tmp_path / "mine.yaml") == replace(load_config(DEMO), margin=0.5)


class TestAllowMissing:
    """The short form sets the option in every data set that has it."""

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
        with pytest.raises(ValueError, match="--allow-missing.*no effect.*digits"):
            load_config(DEMO, allow_missing=True)

    def test_leaves_a_name_that_is_none_to_the_run(self) -> None:
        overrides = ["--data.name=lfw", "--data.ood=[{name: nothing}]"]
        assert load_config(DEMO, overrides, allow_missing=True).data.ood == [OodConfig("nothing")]
