"""Small versions of the papers' controlled experiments: losses on data with a known truth, and tables of accuracy.

An experiment is a frozen record of settings with a method `run`. `lam experiment NAME` runs one of `EXPERIMENTS` and
writes the outcome as JSON and as a page.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, get_origin

from lam.experiments.aninfonce_latents import AnInfoNCELatents
from lam.experiments.augmentation_readout import AugmentationReadout
from lam.experiments.base import Experiment, Outcome
from lam.experiments.explicit_concentration import ExplicitConcentration
from lam.experiments.posterior_recovery import PosteriorRecovery
from lam.experiments.report import Sweep, conduct
from lam.experiments.varcon_accuracy import VarConAccuracy
from lam.utils.files import read_yaml
from lam.utils.settings import align, describe, parse_setting, validated

__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "Sweep", "conduct", "describe_settings", "load_experiment"]

COMMAND = "lam experiment"
EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (PosteriorRecovery, AnInfoNCELatents, AugmentationReadout, VarConAccuracy, ExplicitConcentration)
}


def load_experiment(name: str, overrides: Sequence[str] = ()) -> Experiment | Sweep:
    """An experiment with settings such as `--dimension=10`, or a sweep over values, such as `--dimension=[2,10]`.

    A value of some settings, such as `--losses=[elk]`, is itself a list; then a list of lists makes a sweep. `name`
    may be a YAML file with a `name` and settings; overrides replace its settings.

    Raises:
        ValueError: for an unknown name or setting, a value of another type or range, or a file without settings.

    Example:
        >>> load_experiment("posterior-recovery", ["--dimension=10", "--losses=[elk]"]).losses
        ('elk',)
    """
    settings = {"name": name}
    if Path(name).is_file():
        settings = read_yaml(Path(name))
        if not isinstance(settings, dict) or "name" not in settings:
            raise ValueError(f"{name} must hold the name of an experiment and its settings, got {settings!r}")
    chosen = str(settings.pop("name"))
    if chosen not in EXPERIMENTS:
        raise ValueError(
            f"there is no experiment {chosen!r}; known are {', '.join(EXPERIMENTS)}, or a YAML file with a name"
        )
    experiment = EXPERIMENTS[chosen]
    settings |= dict(parse_setting(override, experiment, COMMAND) for override in overrides)
    swept = {name: values for name, values in settings.items() if _is_swept(experiment, name, values)}
    if not swept:
        return validated(experiment, settings, COMMAND)
    for name, values in swept.items():
        if any(value in values[:number] for number, value in enumerate(values)):
            raise ValueError(f"{name} must be a value or a list of different values, got {values}")
    combinations = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    return Sweep(swept, [validated(experiment, settings | values, COMMAND) for values in combinations])


def _is_swept(experiment: type[Experiment], name: str, values: Any) -> bool:
    """Whether a setting has a list of values; a single value of some settings is itself a list."""
    kinds = {setting.name: get_origin(setting.type) for setting in fields(experiment)}
    if not isinstance(values, list) or not values or name not in kinds:
        return False
    return kinds[name] is not tuple or all(isinstance(value, list) for value in values)


def describe_settings() -> str:
    """Lines of help: each setting of an experiment, its default, its meaning and, if they are few, allowed values."""
    return align([row for name, record in EXPERIMENTS.items() for row in ((f"of {name}:", ""), *describe(record))])
