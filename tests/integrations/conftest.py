"""A calibrated run of texts with classes, for the adapters of text libraries."""

import asyncio
import inspect
import itertools
import json
import random
from pathlib import Path

import pytest

from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from tests.conftest import unrendered_pictures
from tests.text_runs import text_run

TOPICS = {
    "cats": "fur paw whisker purr tail claw kitten meow",
    "trains": "rail station engine track carriage signal tunnel platform",
    "bread": "flour oven crust yeast dough crumb loaf bake",
    "music": "chord melody rhythm piano violin tempo concert song",
}
COMMON = ["the", "and", "of", "many", "old", "new", "two", "very", "often", "some"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, as langchain-tests has."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def topics(path: Path, count: int = 90) -> Path:
    """A file of labelled texts, each with other words."""
    generator, rows = random.Random(0), []
    for label, words in TOPICS.items():
        several = [*itertools.product(itertools.combinations(words.split(), 4), itertools.combinations(COMMON, 2))]
        rows += [{"text": " ".join(own + common), "label": label} for own, common in generator.sample(several, count)]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def topics_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run of labelled texts; tests must not change it."""
    folder = tmp_path_factory.mktemp("topics")
    with unrendered_pictures():
        text_run(folder / "run", topics(folder / "topics.json"), "--method.tune=none")
        calibrate_run(folder / "run", CalibrationOptions(targets=Targets(far=0.2, ood=0.1)), progress=False)
    return folder / "run"
