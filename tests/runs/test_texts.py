"""Runs on texts: labels, questions with answers, and what a run is told by the network's head."""

import json
import shutil
from pathlib import Path

import pytest

from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import calibrate_run
from lam.runs.finished import Run
from lam.runs.index import search
from lam.service.engine import Engine
from tests.conftest import unrendered_pictures
from tests.service.asking import client_of
from tests.text_runs import TOPICS, faq, text_run, topics


@pytest.fixture(scope="module")
def of_topics(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on labelled texts."""
    folder = tmp_path_factory.mktemp("topics")
    return text_run(folder / "run", topics(folder / "topics.json"))


@pytest.fixture(scope="module")
def of_questions(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on questions with answers."""
    folder = tmp_path_factory.mktemp("questions")
    with unrendered_pictures():
        return text_run(folder / "run", faq(folder / "faq.json"))


def test_a_run_on_labelled_texts(of_topics: Run) -> None:
    metrics = json.loads((of_topics.folder / "metrics.json").read_text())
    assert metrics["recall@1"] > 0.8
    assert {"corruption_words_5_recall@1", "corruption_typing_trend"} <= metrics.keys()
    texts = [item.text for item in of_topics.gallery.items]
    assert len(texts) == 24
    assert all(text is not None and " and " in text for text in texts)
    assert {item.label for item in of_topics.gallery.items} == set(TOPICS)


def test_questions_search_among_all_answers(of_questions: Run) -> None:
    texts = {item.text for item in of_questions.gallery.items}
    assert texts == {f"thing{number} is here" for number in range(60)}


def test_texts_are_searched_for(of_topics: Run, tmp_path: Path) -> None:
    result = search(of_topics.folder, texts=["rail and station", "fur and paw"], k=3)
    assert result.images == ("rail and station", "fur and paw")
    assert [items[0].label for items in result.items] == ["trains", "cats"]
    with pytest.warns(UserWarning, match="is longer than the network reads: it was cut"):
        search(of_topics.folder, texts=[2000 * "fur "])
    with pytest.raises(ValueError, match="the text is empty"):
        search(of_topics.folder, texts=[" "])
    with pytest.raises(ValueError, match=r"this run takes texts: give --text or a CSV file of texts"):
        search(of_topics.folder, tmp_path / "cat.png")
    with pytest.raises(ValueError, match="there must be images to search for, .* or texts, and not both"):
        search(of_topics.folder)


def test_a_calibrated_run_of_questions_serves_texts(of_questions: Run, tmp_path: Path) -> None:
    shutil.copytree(of_questions.folder, tmp_path / "run")
    calibration = calibrate_run(tmp_path / "run", targets=Targets(far=0.2, ood=0.2), progress=False)
    assert calibration.gallery_size == 60
    assert calibration.facts["queries"] == 12
    engine = Engine(tmp_path / "run")
    with client_of(engine) as client:
        answer = client.post("/v1/search?k=2", json={"text": "where is thing7"}).json()
        assert answer["decision"] in ("match", "unknown", "abstain")
        assert all(hit["metadata"]["text"].endswith("is here") for hit in answer["hits"])
        for body, message in (({"text": " "}, "the text is empty"), ({"text": 3}, "text: Input should be a valid")):
            refused = client.post("/v1/search", json=body)
            assert refused.status_code == 422
            assert message in refused.json()["error"]
        refused = client.post("/v1/search", content=b"x", headers={"Content-Type": "image/png"})
        assert (refused.status_code, refused.json()["error"]) == (422, "this run takes no images")
