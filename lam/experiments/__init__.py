"""Controlled experiments of the papers, in a small size: losses on data of a known truth, and tables of accuracy.

Each is a frozen record of settings with `run`. `lam experiment NAME` runs one of `EXPERIMENTS` and writes its outcome
as JSON and as a page.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lam.experiments.aninfonce_latents import AnInfoNCELatents
from lam.experiments.base import Experiment, Outcome, conduct
from lam.experiments.explicit_concentration import ExplicitConcentration
from lam.experiments.posterior_recovery import PosteriorRecovery
from lam.experiments.varcon_accuracy import VarConAccuracy
from lam.utils.files import read_yaml

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "conduct", "configured"]

EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (PosteriorRecovery, AnInfoNCELatents, VarConAccuracy, ExplicitConcentration)
}


def configured(name: str, settings: Sequence[str] = ()) -> Experiment:
    """An experiment with settings such as `dimension=10`, whose values are YAML.

    Args:
        name: of the experiment, or a YAML file of this `name` and settings.
        settings: override those of the file.

    Raises:
        ValueError: If a name or setting is unknown, a value has another type or range, or the file holds something
            else.

    Example:
        >>> configured("posterior-recovery", ["dimension=10", "losses=[elk]"]).losses
        ('elk',)
    """
    from pydantic import TypeAdapter, ValidationError  # a quarter of a second to import

    values: dict[str, Any] = {}
    if Path(name).is_file():
        values = read_yaml(name)
        if not isinstance(values, dict):
            raise ValueError(f"{name} must hold the name of an experiment and its settings, got {values!r}")
        name = str(values.pop("name", None))
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no experiment {name!r}; known are {', '.join(EXPERIMENTS)}, or a YAML file with a name"
        )
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting} needs a value, such as {setting}=...")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{key}: {value} is not valid YAML") from None
    known = [field.name for field in fields(EXPERIMENTS[name])]
    for key in values:
        if key not in known:
            raise ValueError(f"there is no setting {key} of {name}; known are {', '.join(known)}")
    try:
        return TypeAdapter(EXPERIMENTS[name]).validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(map(_in_words, error.errors(include_url=False)))) from None


def _in_words(problem: "ErrorDetails") -> str:
    if problem["type"] == "value_error":  # of an experiment's own check, whose message has the value
        return problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"
