"""Every data set with every method over seeds: photographs, faces, characters, clothes, digits and texts.

    python benchmarks/suite.py --data FOLDER [--only NAME ...] [--methods NAME ...] [--seeds 5] [--others 1]
        [--limit N] [--strangers SHARE] [--work FOLDER] [--again] [--set=SETTING ... --name NAME]

FOLDER holds `mnist`, `cifar10/images.tar`, `faces/faces.tar.gz`, `omniglot/images_background_small1.zip`, `clinc150`,
`banking77` and `fashion-mnist`, or `--fashionmnist` names its folder. Missing data sets, and methods that reject the
data, are skipped with a message. A cell is one `lam run` with the method's settings, the same for all data sets, kept
in `--work`, so finished runs are not trained again. `--again` measures all cells anew with the present code, from the
trained encoders. Methods that start from a trained network share the network of `deterministic` with the same seed.
`--seeds` is for the methods in REPEATED, `--others` for the others. results/suite/NAME.json holds the metrics of a data
set by method and seed, to five digits; results of other calls stay in it. With `--strangers 0.5`, half of the classes
are not trained on, and NAME_unseen.json also has metrics among these classes, and the costly metrics. A method with
other settings gets a row
with another name: `--methods deep_ensemble --set=--method.combine=mean --name "deep_ensemble, plain mean"`.
"""

import argparse
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from timing import kept, write

from lam.methods import METHODS
from lam.runs.config import OodConfig, RunConfig
from lam.runs.config_files import load_config
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.runs.plan import Stages
from lam.runs.run import RunResult, evaluate_run, run

REPEATED = ("laplace_posthoc", "laplace_online", "norm", "knn_distance")
FROM_A_NETWORK = ("laplace_posthoc", "norm", "knn_distance", "pfe", "loss_prediction")
PHOTOGRAPHS_OUTSIDE = ("bird", "dog", "truck")
ALPHABET_OUTSIDE = "Korean"
PEOPLE_KNOWN = 15
NOT_ASKED: dict[str, Any] = {"limit": None, "strangers": 0.0, "accelerator": "cpu", "set": [], "name": None}
"""The command line for `configured`, in benchmarks without these options."""


@dataclass(frozen=True)
class Source:
    """A data set of the suite.

    Attributes:
        configuration: configuration of `lam run`.
        settings: settings for all methods.
        ood: OOD sets, the main one first.
    """

    configuration: str
    settings: tuple[str, ...] = ()
    ood: tuple[OodConfig, ...] = ()


def digits(parsed: argparse.Namespace) -> Source:
    """Scikit-learn's digits; the OOD sets are 8 and 9, and patches of photographs."""
    return Source("digits")


def fashionmnist(parsed: argparse.Namespace) -> Source:
    """Clothes; digits are the OOD set."""
    root = existing(Path(parsed.fashionmnist or parsed.data / "fashion-mnist"))
    mnist = existing(parsed.data / "mnist")
    return Source("fashionmnist", (f"--data.root={root}",), (OodConfig("mnist", str(mnist)),))


def photographs(parsed: argparse.Namespace) -> Source:
    """CIFAR-10: seven classes are known; OOD sets are birds, dogs and trucks, clothes, and digits."""
    folder = unpacked(parsed.data / "cifar10" / "images.tar", parsed.work) / "cifar10"
    known, outside = parted(folder, lambda path: path.parts[-2] not in PHOTOGRAPHS_OUTSIDE)
    sets = (OodConfig("folder", str(outside), title="held-out"), *elsewhere(parsed))
    return folder_of(known, sets, "mode: RGB, size: 32", "convnet32", 16, epochs=12, batch_size=128)


def faces(parsed: argparse.Namespace) -> Source:
    """The ORL faces: fifteen people are known, five are strangers."""
    folder = unpacked(parsed.data / "faces" / "faces.tar.gz", parsed.work) / "faces"
    known, outside = parted(folder, lambda path: int(path.parts[-2][1:]) <= PEOPLE_KNOWN)
    sets = (OodConfig("folder", str(outside), title="strangers"),)
    return folder_of(known, sets, "mode: RGB, size: 64", "resnet18", 64, epochs=5, batch_size=64)


def characters(parsed: argparse.Namespace) -> Source:
    """Omniglot: the characters of four alphabets are known; OOD sets are a fifth alphabet, and digits."""
    archive = parsed.data / "omniglot" / "images_background_small1.zip"
    folder = unpacked(archive, parsed.work) / "images_background_small1"
    known, outside = parted(folder, lambda path: path.parts[-3] != ALPHABET_OUTSIDE)
    sets = (OodConfig("folder", str(outside), title="another-alphabet"), *elsewhere(parsed)[:1])
    return folder_of(known, sets, "mode: L, size: 28", "convnet28", 32, epochs=20, batch_size=128, per_class=8)


def clinc150(parsed: argparse.Namespace) -> Source:
    """Questions to an assistant by intent; questions out of scope are the OOD set."""
    root = existing(parsed.data / "clinc150")
    return Source("clinc150", (f"--data.root={root}",), (OodConfig("clinc150_oos", str(root)),))


def banking77(parsed: argparse.Namespace) -> Source:
    """Questions to a bank by intent; an assistant's questions out of scope are the OOD set."""
    root = existing(parsed.data / "banking77")
    scope = parsed.data / "clinc150"
    ood = (OodConfig("clinc150_oos", str(scope)),) if scope.is_dir() else ()
    return Source("banking77", (f"--data.root={root}",), ood)


def docstrings(parsed: argparse.Namespace) -> Source:
    """Sentences of Python's standard library by module; sentences about flowers, wine and patients are the OOD set."""
    return Source("docstrings")


SOURCES: dict[str, Callable[[argparse.Namespace], Source]] = {
    "digits": digits,
    "fashionmnist": fashionmnist,
    "photographs": photographs,
    "faces": faces,
    "characters": characters,
    "clinc150": clinc150,
    "banking77": banking77,
    "docstrings": docstrings,
}


def folder_of(
    known: Path, ood: tuple[OodConfig, ...], preprocessing: str, network: str, dimension: int, **training: int
) -> Source:
    """Images in class folders, with the default settings except size, network and length of training."""
    settings = (
        *(f"--data.root={known}", f"--data.options={{preprocessing: {{{preprocessing}}}}}", "--network.weights=null"),
        *(f"--network.name={network}", f"--network.dimension={dimension}"),
        *(f"--training.{name}={value}" for name, value in training.items()),
    )
    return Source("folder", settings, ood)


def elsewhere(parsed: argparse.Namespace) -> tuple[OodConfig, ...]:
    """Digits and clothes, unlike all data sets here, if they are available."""
    clothes = Path(parsed.fashionmnist or parsed.data / "fashion-mnist")
    sets = {"mnist": parsed.data / "mnist", "fashionmnist": clothes}
    return tuple(OodConfig(name, str(root)) for name, root in sets.items() if root.is_dir())


def existing(path: Path) -> Path:
    """The path itself.

    Raises:
        FileNotFoundError: if the path does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    return path


def unpacked(archive: Path, work: Path) -> Path:
    """The folder of an unpacked archive; it is unpacked once."""
    folder = work / "data" / archive.parent.name
    if not folder.is_dir():
        existing(archive)
        unfinished = folder.with_suffix(".unfinished")
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(unfinished)
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(unfinished, filter="data")
        unfinished.rename(folder)
    return folder


def parted(folder: Path, is_known: Callable[[Path], bool]) -> tuple[Path, Path]:
    """Two folders of links to the images of a folder: one for known classes, one for the others.

    Splits such as `train` stay. Other folders above a class, such as alphabets, become part of its name.
    """
    sides = folder.with_name("known"), folder.with_name("outside")
    if not sides[0].is_dir():
        for image in sorted(path for path in folder.rglob("*") if path.is_file()):
            part, *rest = image.relative_to(folder).parts[:-1]
            place = Path(part, *rest) if part in ("train", "validation", "test") else Path("-".join((part, *rest)))
            link = sides[0 if is_known(image) else 1] / place / image.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image)
    return sides


def configured(parsed: argparse.Namespace, name: str, source: Source, method: str, seed: int) -> RunConfig:
    """The cell's configuration."""
    output = parsed.work / f"{name}-{(parsed.name or method).replace(', ', '+')}-{seed}"
    settings = [*source.settings, f"--data.strangers={parsed.strangers}", f"--seed={seed}", f"--output={output}"]
    settings.append(f"--accelerator={parsed.accelerator}")
    if parsed.limit:
        settings.append(f"--data.limit={parsed.limit}")
    if parsed.strangers:
        settings.append("--evaluation.costly=true")
    if method in FROM_A_NETWORK:
        settings.append(f"--checkpoint={parsed.work / f'{name}-deterministic-{seed}'}")
    config = load_config(f"{source.configuration} {method}", [*settings, *parsed.set])
    return replace(config, data=replace(config.data, ood=list(source.ood))) if source.ood else config


def cell(parsed: argparse.Namespace, name: str, source: Source, method: str, seed: int) -> RunResult:
    """The run of a cell, after the run whose network it starts from."""
    if method in FROM_A_NETWORK:
        plain = argparse.Namespace(**{**vars(parsed), "set": [], "name": None})
        cell(plain, name, source, "deterministic", seed)
    return run(configured(parsed, name, source, method, seed), progress=False)


def measured(parsed: argparse.Namespace, name: str, source: Source, method: str, seed: int) -> dict[str, Any]:
    """The metrics of a cell, to five digits."""
    metrics = cell(parsed, name, source, method, seed).metrics
    if parsed.again:
        config = configured(parsed, name, source, method, seed)
        encoder, stages = Run(config.folder).encoder, Stages(progress=False)
        metrics |= evaluate_run(config, encoder, *load_data(config.data), stages)[2]
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in metrics.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--fashionmnist", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5, help=f"of {', '.join(REPEATED)}")
    parser.add_argument("--others", type=int, default=1, help="seeds of the other methods")
    parser.add_argument("--limit", type=int, help="of the items of each part; `--work` and results are then apart")
    parser.add_argument("--strangers", type=float, default=0.0, help="share of the classes in no training; then apart")
    parser.add_argument("--work", type=Path, default=Path("runs/suite"), help="where data and runs are kept")
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda or auto: a GPU's figures differ by rounding")
    parser.add_argument("--set", action="append", default=[], help="another setting: --set=--method.refit=false")
    parser.add_argument("--name", help="of the row with other settings")
    parser.add_argument("--again", action="store_true", help="measure finished cells anew")
    parsed = parser.parse_args()
    if bool(parsed.set) != bool(parsed.name) or (parsed.name and len(parsed.methods) > 1):
        parser.error("--set and --name go together, with one method")
    apart = (f"_{parsed.limit}" if parsed.limit else "") + ("_unseen" if parsed.strangers else "")
    parsed.data, parsed.work = parsed.data.resolve(), parsed.work.with_name(parsed.work.name + apart).resolve()
    for name in parsed.only:
        try:
            source = SOURCES[name](parsed)
        except FileNotFoundError as missing:
            print(f"{name} is left out: there is no {missing}", file=sys.stderr)
            continue
        written = f"suite/{name}{apart}"
        for method in parsed.methods:
            for seed in range(parsed.seeds if method in REPEATED else parsed.others):
                try:
                    metrics = measured(parsed, name, source, method, seed)
                except ValueError as refused:
                    print(f"{method} is left out of {name}: {refused}", file=sys.stderr)
                    break
                print(f"{name}, {method}, seed {seed}: {metrics}", file=sys.stderr, flush=True)
                results = kept(written)
                results.setdefault(parsed.name or method, {})[str(seed)] = metrics
                write(written, results)


if __name__ == "__main__":
    sys.exit(main())
