"""Controlled experiments of the papers: losses on data whose truth is known, and tables of accuracy in a small size.

Each is a frozen record of settings with `run`. `lam experiment NAME` runs one and writes what came out as JSON and as a
page. `EXPERIMENTS` has them by name.
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

EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (PosteriorRecovery, AnInfoNCELatents, VarConAccuracy, ExplicitConcentration)
}


def configured(name: str, settings: Sequence[str] = ()) -> Experiment:
    """An experiment with settings such as `dimension=10`, values as YAML has them.

    Args:
        name: of the experiment, or a YAML file that has it as `name`, beside settings.
        settings: above those of the file.

    Raises:
        ValueError: for an unknown name or setting, a value of another type or outside its range, or a file of something
            else.

    Example:
        >>> configured("posterior-recovery", ["dimension=10", "losses=[elk]"]).losses
        ('elk',)
    """
    from pydantic import TypeAdapter, ValidationError  # a quarter of a second to import

    values: dict[str, Any] = {}
    if Path(name).is_file():
        values = _read(Path(name))
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
        problems = error.errors(include_url=False)
        raise ValueError("; ".join(map(_in_words, problems))) from None


def _read(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold the name of an experiment and its settings, got {values!r}")
    return values


def _in_words(problem: "ErrorDetails") -> str:
    if problem["type"] == "value_error":  # of an experiment's own check, which says what it was given
        return problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}, got {problem['input']!r}"


__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "conduct", "configured"]
