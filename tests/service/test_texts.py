"""A run on texts, served: texts that are searched for, and the page that asks for them."""

import shutil
from pathlib import Path

import pytest

from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import calibrate_run
from tests.service.browser import CHROMIUM, browsing
from tests.service.serving import started
from tests.text_runs import faq, text_run

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="session")
def calibrated_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run of questions and answers; tests must not change it."""
    folder = tmp_path_factory.mktemp("texts")
    text_run(folder / "run", faq(folder / "faq.json"))
    calibrate_run(folder / "run", targets=Targets(far=0.2, ood=0.2), progress=False)
    return folder / "run"


@pytest.fixture
def served_texts(calibrated_texts: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(calibrated_texts, tmp_path / "run"))


@pytest.mark.long
@needs_chromium
def test_the_page_shows_an_answer_once(served_texts: Path, tmp_path: Path) -> None:
    with started("tests.service.serve_quickly", run=served_texts) as (_, address, _), browsing(tmp_path / "tab") as tab:
        tab.open(address)
        tab.wait("!document.querySelector('#desk').hidden")
        tab.run("document.querySelector('#text').value = 'where is thing7'")
        tab.run("document.querySelector('#asking').requestSubmit()")
        tab.wait("document.querySelectorAll('#hits li').length > 0")
        first = tab.text("#hits li")
        assert first.count("is here") == 1
        assert "#1" in first
        cases = (
            ("{label: 'a', metadata: {text: 'a'}}", True),
            ("{label: 'a', metadata: {text: 'a cat'}}", False),
            ("{label: 'a c… (7)', metadata: {text: 'a cat'}}", True),
            ("{label: 'a d… (7)', metadata: {text: 'a cat'}}", False),
            ("{label: '', metadata: {text: 'a cat'}}", False),
            ("{label: 'a', metadata: {}}", False),
        )
        for hit, repeats in cases:
            assert tab.run(f"import('/words.js').then((words) => words.repeatsText({hit}))") is repeats
        assert tab.complaints == []
