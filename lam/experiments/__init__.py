"""Controlled experiments of the papers: losses on data whose truth is known, and tables of accuracy in a small size.

Each is a frozen record of settings with `run`. `lam experiment NAME` runs one and writes what came out as JSON and as a
page. `EXPERIMENTS` has them by name.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import yaml

from lam.experiments.aninfonce_latents import AnInfoNCELatents
from lam.experiments.base import Experiment, Outcome, conduct
from lam.experiments.explicit_concentration import ExplicitConcentration
from lam.experiments.posterior_recovery import PosteriorRecovery
from lam.experiments.varcon_accuracy import VarConAccuracy

EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (PosteriorRecovery, AnInfoNCELatents, VarConAccuracy, ExplicitConcentration)
}


def configured(name: str, settings: Sequence[str] = ()) -> Experiment:
    """An experiment with settings such as `dimension=10`, values as YAML has them.

    Raises:
        ValueError: for an unknown name or setting, or a value of another type or outside its range.

    Example:
        >>> configured("posterior-recovery", ["dimension=10", "losses=[elk]"]).losses
        ('elk',)
    """
    from pydantic import TypeAdapter, ValidationError  # a quarter of a second to import

    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    values: dict[str, Any] = {}
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
        texts = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ") for problem in problems]
        raise ValueError("; ".join(text.replace("Value error, ", "") for text in texts)) from None


__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "conduct", "configured"]
