"""Every configuration that ships is valid, and runs to its end on a small data set in the layout that it reads.

Here weights are random and images grey: no test has the original data or the pretrained weights.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from lam.datasets import Dataset
from lam.methods import METHODS
from lam.runs.config import RunConfig
from lam.runs.config_files import SHIPPED, load_config, shipped
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.runs.run import run
from tests.datasets import layouts
from tests.models import bag_of_words  # noqa: F401 - which registers itself

FILES = sorted(SHIPPED.glob("*/*.yaml"))
DATA = shipped("data")
TEXTS = ("banking77", "clinc150", "docstrings", "texts")
PUBLISHED = ("fashionmnist", "cifar10", "cub200", "lfw", "msls")
AUTHORS_HAVE = {data: yaml.safe_load((SHIPPED / "paper" / f"{data}.yaml").read_text())["methods"] for data in PUBLISHED}
PAPER = [f"{data} {method} --paper" for data, sections in AUTHORS_HAVE.items() for method in sections]
NAMES = [*(f"{data} {method}" for data in DATA for method in METHODS), *PAPER]
REFUSED = {
    **{f"{data} {method}": "random crops" for data in TEXTS for method in ("simclr", "simsiam", "byol", "swav")},
    **{f"{data} varcon": "VarCon needs classes" for data in ("msls", "places")},
}
RUN_ALWAYS = {name for name in NAMES if name.startswith("digits ")} | {
    f"{data} {method}"
    for data in (*PUBLISHED, "folder", "places", "texts")
    for method in ("deterministic", "laplace_online")
}

SHORT = (
    *("--data.limit=40", "--training.epochs=1", "--training.batch_size=16", "--training.checkpoint_every=null"),
    *("--evaluation.n_samples=3", "--evaluation.reference=20", "--accelerator=cpu"),
)
SHORT_METHODS = {
    "laplace_posthoc": ("--method.batch_size=16",),
    "pfe": ("--method.epochs=1",),
    "hib": ("--method.n_samples=2",),
    "deep_ensemble": ("--method.n_members=2", "--method.reference=20"),
    "knn_distance": ("--method.reference=20",),
}
CALMER = {
    "cub200 hib --paper": ("--training.learning_rate=1e-3",),
    "fashionmnist pfe --paper": ("--method.learning_rate=1e-4",),
}
"""The authors' learning rate is too high for random weights and grey images, which overflow within three steps."""

CUT_TO_THREE = {("cifar10", "hib"), ("cifar10", "mc_dropout")}


class Authors(NamedTuple):
    """Settings of one data set in the authors' files; learning rates are not yet multiplied by the batch size."""

    margin: float
    images_each: int
    """Images for each entry of a batch: one, or two with a partner."""
    plain: tuple[float, int, int, str]
    """Learning rate, batch size, epochs and triplets of the deterministic network; next, of the online one."""
    online_training: tuple[float, int, int, str]
    online: tuple[float, float, float]
    """Likelihood scale, initial precision and memory factor."""
    online_triplets: tuple[str, int]
    posthoc: tuple[str, int]
    pfe: tuple[float, int, int]
    """Learning rate, batch size and epochs of PFE; next, of HIB, if the authors have it."""
    hib: tuple[float, int, int] | None


AUTHORS = {
    "fashionmnist": Authors(
        *(0.7, 1, (1e-3, 256, 20, "violating"), (1e-3, 64, 20, "violating")),
        *((60000.0**2, 60000.0, 0.999), ("violating", 5000), ("violating", 5000)),
        *((1e-3, 256, 20), (1e-5, 256, 20)),
    ),
    "cifar10": Authors(
        *(0.7, 1, (1e-5, 256, 20, "violating"), (1e-5, 256, 40, "violating")),
        *((50000.0**2, 50000.0, 0.999), ("hard", 5000), ("violating", 5000)),
        *((1e-5, 256, 20), (1e-5, 256, 20)),
    ),
    "cub200": Authors(
        *(1.0, 1, (3e-7, 64, 20, "semihard"), (3e-7, 64, 20, "semihard")),
        *((5864.0**2, 1e6, 0.9997), ("violating", 30), ("semihard", 30)),
        *((1e-3, 64, 10), (1e-3, 64, 10)),
    ),
    "lfw": Authors(
        *(1.0, 2, (3e-7, 64, 200, "semihard"), (3e-7, 64, 200, "semihard")),
        *((9525.0**2, 9525.0, 0.995), ("semihard", 30), ("semihard", 30)),
        *((3e-7, 64, 10), None),
    ),
    "msls": Authors(
        *(0.1, 2, (1e-7, 64, 30, "violating"), (3e-7, 64, 20, "violating")),
        *((1e6, 1e6, 0.99999), ("semihard", 10), ("violating", 10)),
        *((1e-4, 64, 10), None),
    ),
}

RESNET = ("--network.name=resnet18", "--network.dimension=8", "--network.weights=null")
TINY_IMAGES = "preprocessing: {mode: RGB, size: [32, 32]}"
PEOPLE = (
    {f"Person_{letter}": 3 for letter in "ABCDEFGHIJKLM"} | {f"Stranger_{letter}": 1 for letter in "ABCDEFGHIJ"},
    {f"Person_{letter}": 3 for letter in "VWXYZ"} | {"Stranger_V": 1},
)
CITIES = ("train_cities: [boston, goa]", "validation_cities: [amman]", "test_cities: [cph]")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for $LAM_DATA with a small data set in each layout."""
    root = tmp_path_factory.mktemp("data")
    for name in ("fashionmnist", "mnist"):
        layouts.mnist(root / name, n_train=100, n_test=40)
    layouts.cifar10(root / "cifar10")
    layouts.svhn(root / "svhn")
    layouts.cub200(root / "cub200", n_classes=16)
    layouts.cars196(root / "cars196")
    layouts.lfw(root / "lfw", *PEOPLE)
    layouts.msls(root / "msls", ("boston", "goa", "amman", "cph"), each=10)
    for row in range(24):
        layouts.picture(root / "folder" / f"class_{row % 3}" / f"{row}.png", 10 * row)
    rows = [{"path": f"{i}.png", "x": 4 * i, "y": 0} for i in range(60)]
    layouts.places(root / "places", rows)
    layouts.clinc150(root / "clinc150")
    for name in ("banking77", "texts"):
        layouts.texts(root / name)
    return root


def options_of(data: str) -> tuple[str, ...]:
    """Options for small images, a small network and small splits."""
    if data in ("digits", "fashionmnist", "cifar10"):
        return () if data == "digits" else ("--data.options={validation: 20}",)
    if data in TEXTS:
        validation = ("--data.options={validation: 0.5}",) if data == "banking77" else ()
        return (*validation, "--network.name=bag_of_words", "--network.dimension=8", "--training.learning_rate=0.01")
    if data in ("folder", "places", "spots"):
        small = f"--data.options={{{TINY_IMAGES}}}"
        return (*RESNET, small)
    sizes = {"cub200": "validation: 0.5", "lfw": "validation: 0.3", "msls": ", ".join(CITIES)}
    return (*RESNET, f"--data.options={{preprocessing: {{crop: 32}}, {sizes[data]}}}")


def small(name: str, root: Path, output: Path) -> RunConfig:
    data, method, *_ = name.split()
    own = (f"--data.root={root / data}",) if data in ("folder", "places", "texts") else ()  # others find themselves
    overrides = [*SHORT, *SHORT_METHODS.get(method, ()), *options_of(data), *own, *CALMER.get(name, ())]
    return load_config(name, [*overrides, f"--output={output}"])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_is_valid_and_says_what_it_is(name: str) -> None:
    config = load_config(name)
    config.check()
    assert name.removesuffix(" --paper") == f"{config.data.name} {config.method.name}"
    assert RunConfig.parsed(config.resolved()).resolved() == config.resolved()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_begins_with_what_it_is_and_fits_the_screen(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    assert all(len(line) <= 120 for line in text.splitlines())


def test_every_data_set_has_a_file_and_methods_where_they_need_more_than_their_defaults() -> None:
    assert set(shipped("methods")) <= set(METHODS)
    for path in (SHIPPED / "methods").glob("*.yaml"):
        assert yaml.safe_load(path.read_text()) != {"method": path.stem}, path
    assert {"digits", "folder", "places", "spots", *TEXTS, *PUBLISHED} == set(DATA)
    assert set(PUBLISHED) == set(shipped("paper"))
    for kind in ("data", "paper"):
        for path in (SHIPPED / kind).glob("*.yaml"):
            assert set(yaml.safe_load(path.read_text()).get("methods", {})) <= set(METHODS)
    assert len(FILES) <= 30


@pytest.mark.parametrize("name", PAPER)
def test_the_authors_settings_are_theirs_in_every_method(name: str) -> None:
    config = load_config(name)
    training, twin = config.training, load_config(name.removesuffix(" --paper"))
    assert (training.loss, training.optimizer, training.weight_decay) == ("pml", "rmsprop", 1e-5)
    assert training.learning_rate_decay == pytest.approx(math.exp(-0.01), abs=1e-9)
    same = replace(twin.data, strangers=config.data.strangers)
    assert (config.data, config.augmentation) == (same, twin.augmentation)
    expected = None if config.data.name == "msls" else 0  # places have no classes
    assert config.data.strangers == expected, "no class is held out where a published row stands beside ours"
    dimension = 3 if (config.data.name, config.method.name) in CUT_TO_THREE else twin.network.dimension
    assert config.network == replace(twin.network, dimension=dimension)


@pytest.mark.parametrize("data", PUBLISHED)
def test_the_authors_numbers_are_those_of_their_files_and_code(data: str) -> None:
    theirs = AUTHORS[data]

    def settings(method: str) -> RunConfig:
        return load_config(f"{data} {method} --paper")

    def of(method: str) -> Any:
        return settings(method).method

    plain, online, posthoc = settings("deterministic"), settings("laplace_online"), of("laplace_posthoc")
    for config, (rate, size, epochs, miner) in ((plain, theirs.plain), (online, theirs.online_training)):
        training = config.training
        assert training.learning_rate == pytest.approx(rate * size)
        assert (training.epochs, training.miner) == (epochs, miner)
        assert training.batch_size == size * theirs.images_each
        assert (config.margin, training.per_class) == (theirs.margin, 2 if theirs.images_each == 2 else None)
    kept = of("laplace_online")
    assert (kept.likelihood_scale, kept.initial_precision, kept.memory_factor) == theirs.online
    assert (kept.hessian_miner, kept.hessian_max_pairs) == theirs.online_triplets
    assert (kept.update, kept.refit, kept.margin, kept.tune) == ("accumulate", False, 2.0, "none")
    assert (posthoc.average, posthoc.likelihood_scale, posthoc.prior_precision) == (False, 1.0, 1.0)
    assert (posthoc.tune, posthoc.tune_step) == (("none", None) if data != "msls" else ("marginal_likelihood", 0.1))
    if data != "msls":
        assert (posthoc.miner, posthoc.max_pairs, posthoc.batch_size) == (*theirs.posthoc, 64 * theirs.images_each)
    for options in (kept, posthoc):
        assert (options.split, options.fix, options.margin, options.negative_weight) == ("arccos", "fixed", 2.0, 1.0)
        assert options.mean == "sampled"


@pytest.mark.parametrize("data", PUBLISHED)
def test_the_authors_numbers_of_the_rivals_are_theirs_too(data: str) -> None:
    theirs, methods = AUTHORS[data], AUTHORS_HAVE[data]
    plain = load_config(f"{data} deterministic --paper")
    pfe: Any = load_config(f"{data} pfe --paper").method
    rate, size, epochs = theirs.pfe
    assert (pfe.learning_rate, pfe.epochs) == (pytest.approx(rate * size), epochs)
    dropout = load_config(f"{data} mc_dropout --paper")
    assert dropout.network.options["dropout"] == 0.05
    assert dropout.training == plain.training
    assert ("hib" in methods, "deep_ensemble" in methods) == (theirs.hib is not None, data != "msls")
    if theirs.hib is not None:
        rate, size, epochs = theirs.hib
        hib = load_config(f"{data} hib --paper")
        options: Any = hib.method
        assert (hib.training.learning_rate, hib.training.epochs) == (pytest.approx(rate * size), epochs)
        assert (options.n_samples, options.kl_weight) == (8, 1e-4)
    if data != "msls":
        members: Any = load_config(f"{data} deep_ensemble --paper").method
        assert (members.n_members, members.combine) == (5, "mean")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:κ is .* for all")  # a few steps from random weights leave vague posteriors
@pytest.mark.filterwarnings("ignore:the data hold .* exact copies")
@pytest.mark.parametrize(
    "name",
    [
        name if name in RUN_ALWAYS else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if name not in REFUSED
    ],
)
def test_runs_to_its_end(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAM_DATA", str(data))
    config = small(name, data, tmp_path / "run")
    metrics = run(config, progress=False).metrics
    assert 0 <= metrics["map@1"] <= 1
    for number, found in enumerate(config.data.ood):
        assert 0 <= metrics[f"auroc@{found.name}" if number else "auroc"] <= 1
    assert_images_find_themselves(tmp_path / "run", load_data(config.data)[0].test)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the data hold .* exact copies")
@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_does_not_suit_the_data_is_refused(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAM_DATA", str(data))
    with pytest.raises(ValueError, match=REFUSED[name]):
        run(small(name, data, tmp_path / "run"), progress=False)


def assert_images_find_themselves(folder: Path, images: Dataset) -> None:
    """An image, embedded alone, finds its own item first, for every encoder."""
    encoder, index = Run(folder).encoder, Run(folder).gallery
    assert encoder.n_samples == 3
    indexed = images if len(index) == len(images) else images.subset((~images.is_query).nonzero()[:, 0])  # type: ignore[attr-defined]
    for row in range(0, len(index), max(1, len(index) // 4)):
        found = index.search(encoder.embed(indexed[row][0][None]), k=len(index))
        assert row in found.ids[found.scores > 1 - 1e-6]
