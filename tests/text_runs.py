"""Small runs on texts, with a network that needs no library."""

import json
from pathlib import Path

from lam.runs.config_files import load_config
from lam.runs.finished import Run
from lam.runs.run import run
from tests.models import bag_of_words  # noqa: F401 - which registers itself

TOPICS = {"cats": "fur paw whisker purr", "trains": "rail station engine track", "bread": "flour oven crust yeast"}


def topics(path: Path, count: int = 40) -> Path:
    """A file of labelled texts."""
    rows = [
        {"text": f"{words[number % 4]} and {words[(number + 1) % 4]} {number}", "label": label}
        for label, words in ((label, words.split()) for label, words in TOPICS.items())
        for number in range(count)
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def faq(path: Path) -> Path:
    """A file of questions with answers."""
    rows = [{"question": f"where is thing{number}", "answer": f"thing{number} is here"} for number in range(60)]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def text_run(folder: Path, data: Path, *settings: str) -> Run:
    """A finished run on the texts of a file."""
    words = ["--network.name=bag_of_words", "--network.dimension=8", "--training.epochs=3", "--accelerator=cpu"]
    words += [f"--data.root={data}", f"--output={folder}", "--evaluation.n_samples=8", *settings]
    run(load_config("texts laplace_posthoc", words), progress=False)
    return Run(folder)
