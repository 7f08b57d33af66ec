"""The page in headless Chromium: it shows the answers of the service; by mouse and by keyboard."""

import base64
import contextlib
import csv
import io
import itertools
import json
import re
import shutil
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from lam import datasets
from lam.cli import main
from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.service.app import PAGE
from tests.conftest import FinishedRun
from tests.service.browser import Browser, browsing
from tests.service.conftest import encoded
from tests.service.serving import started, until

pytestmark = pytest.mark.long

TONES = ("match", "likely", "perhaps", "unknown", "abstain")
KEY = "a-key"
Matched = tuple[bytes, dict[str, Any]]


def tone_of(answer: dict[str, Any]) -> str:
    """How sure the page's words for an answer are, in a gallery of classes."""
    if answer["decision"] == "unknown":
        return "unknown" if answer["known"] < 0.2 else "perhaps"
    if answer["decision"] == "abstain" or answer["probability"] >= 0.8:
        return answer["decision"]
    return "likely" if answer["probability"] >= 0.5 else "perhaps"


def words_of(answer: dict[str, Any]) -> str:
    """The page's words for an answer, in a gallery of classes."""
    name = f"“\u2068{answer['hits'][0]['label']}\u2069”"
    words = {"match": f"It is {name}", "likely": f"Probably {name}", "perhaps": f"Perhaps {name}, or none of these"}
    words["unknown"] = "Probably none of these"
    return words.get(tone_of(answer), "Not sure")


@contextlib.contextmanager
def serving(run: Path, *module: str, **environment: str) -> Iterator[str]:
    """`lam serve`, or a similar module, in its own process; yields its address."""
    with started(*(module or ("lam", "serve")), run=run, **environment) as (_, address, _):
        yield address


def fetch(address: str, body: bytes | None = None, kind: str = "image/png", method: str | None = None) -> Any:
    """The service's answer."""
    request = urllib.request.Request(address, body, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def search(address: str, body: bytes) -> dict[str, Any]:
    return fetch(f"{address}/v1/search?k=100", body)


def digits() -> Iterator[bytes]:
    """The digits of the test split."""
    test = datasets.load("digits").test
    for number in range(len(test)):
        pixels = test.preprocessing.denormalize(test[number][0]).mul(255).round().to(torch.uint8)[0]
        yield encoded(Image.fromarray(pixels.numpy()))


def patches() -> Iterator[bytes]:
    """Parts of a photograph."""
    photograph = Image.fromarray(load_sample_image("flower.jpg"))
    for number in range(40):
        left, top = 60 * (number % 8), 60 * (number // 8)
        yield encoded(photograph.crop((left, top, left + 90, top + 90)))


def first(address: str, images: Iterator[bytes], decision: str) -> Matched:
    """The first image that gets such a decision."""
    for image in images:
        answer = search(address, image)
        if answer["decision"] == decision:
            return image, answer
    raise AssertionError("no image got such a decision")


@pytest.fixture(scope="module")
def address(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The finished run, served; after two epochs, its features separate photographs from digits, but κ does not."""
    run = Path(shutil.copytree(finished_run.folder, tmp_path_factory.mktemp("page") / "run"))
    calibrate_run(
        run, CalibrationOptions(targets=Targets(far=0.1, ood=0.1, conformal_miss=0.1), flag="combined"), progress=False
    )
    with serving(run) as found:
        yield found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


def opened(tab: Browser, address: str) -> None:
    """Open the page, and wait for its desk."""
    tab.show_as()
    tab.open(address)
    tab.wait("!document.querySelector('#desk').hidden")


@pytest.fixture
def page(tab: Browser, address: str) -> Iterator[Browser]:
    """The page, opened again; it must have no errors at the end."""
    tab.complaints.clear()
    opened(tab, address)
    yield tab
    assert tab.complaints == []


def answered(page: Browser) -> str:
    """The word of the decision, once hits and their pictures are loaded."""
    page.wait("!document.querySelector('#answer').ariaBusy")
    page.wait("document.querySelector('#word').innerText !== 'Nothing asked yet'")
    page.wait("[...document.querySelectorAll('.picture')].every(({firstChild: i}) => i && (i.complete ?? true))")
    return page.text("#word")


def give(page: Browser, file: Path, content: bytes, to: str = "#file") -> None:
    file.write_bytes(content)
    page.choose(to, file)


def upload(page: Browser, file: Path, image: bytes) -> str:
    give(page, file, image)
    return answered(page)


@pytest.fixture
def matched(page: Browser, address: str, tmp_path: Path) -> Matched:
    """An image that finds a match, given to the page, and its answer."""
    image, answer = first(address, digits(), "match")
    upload(page, tmp_path / "digit.png", image)
    return image, answer


def in_view(page: Browser, selector: str) -> bool:
    """Whether a part stands on the screen of a phone."""
    place = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
    top, bottom = page.run(f"(({{top, bottom}}) => [top, bottom])({place})")
    return -1 < top < bottom < 845  # scrolling ends at whole pixels


def tone_of_page(page: Browser) -> str:
    """The tone that colours the verdict."""
    return page.run("document.querySelector('#decision').className").removeprefix("decision ")


def asks(page: Browser, script: str) -> str:
    """The word of the decision after a script that searches."""
    page.run("document.querySelector('#word').textContent = 'Nothing asked yet'")
    page.run(script)
    return answered(page)


@pytest.mark.parametrize(("images", "decision"), [(digits, "match"), (digits, "unknown"), (patches, "abstain")])
def test_the_verdict_and_the_probability_come_first(
    page: Browser, address: str, tmp_path: Path, images: Callable[[], Iterator[bytes]], decision: str
) -> None:
    image, answer = first(address, images(), decision)
    assert upload(page, tmp_path / "image.png", image) == words_of(answer)
    tone = tone_of(answer)
    assert tone_of_page(page) == tone
    assert page.run("document.querySelector('#probability').hidden") == (decision == "abstain")
    if decision != "abstain":
        value, meaning = page.text("#probability-value"), page.text("#probability-meaning")
        name = f"“\u2068{answer['hits'][0]['label']}\u2069”"
        assert meaning == f"that {name} is right, where half of all queries have no match"
        assert float(re.sub(r"[^\d.]", "", value)) == pytest.approx(100 * answer["probability"], rel=0.05, abs=0.1)
    factors = "that the gallery holds it at all, where half of all queries have no match"
    assert (factors in page.run("document.querySelector('#facts').textContent")) == (decision != "abstain")
    assert page.run("document.querySelector('#numbers').open") is False
    tags = page.run("[...document.querySelectorAll('#hits li')].map((card) => card.querySelector('.tag')?.innerText)")
    rests_on_it = {"match": "✓ accepted", "unknown": "✕ not accepted"}
    assert tags[0] == rests_on_it.get(decision)
    assert set(tags[1:]) == {None}


def test_an_answer_is_shown_in_numbers_and_pictures(page: Browser, address: str, matched: Matched) -> None:
    _, answer = matched
    page.run("document.querySelector('#numbers').open = true")
    facts = page.text("#facts")
    for name in ("κ", "Best cosine", "Credible cap", "P(known)", "P(right | known)", "As good by chance"):
        assert name in facts
    assert page.call("numbers.cosine", answer["hits"][0]["score"]) in facts
    assert "Of searches with no match in the gallery at most" in page.text("#reason")
    assert "because this probability is above" in page.text("#reason")
    promised = fetch(f"{address}/v1/calibration")["facts"]["false_accepts"]
    assert page.text("#promise") == f"This rate holds {promised}."
    depth = [hit["conformal"] for hit in answer["hits"]].count(True)
    assert f"among the first {depth} items" in page.text("#hits-text")
    labels = [hit["label"] for hit in answer["hits"][:12]]
    agreeing = "All" if len(set(labels)) == 1 else labels.count(labels[0])
    assert f"{agreeing} of the 12 nearest items are “\u2068{labels[0]}\u2069”." in page.text("#hits-text")
    assert page.run("document.querySelectorAll('#kappa-chart rect').length") == 40
    assert page.run("document.querySelectorAll('#angle-chart circle').length") == len(answer["hits"])
    assert "of the calibration" in page.text("#kappa-text")
    assert page.run("[...document.querySelectorAll('#hits img')].every(({naturalWidth}) => naturalWidth === 8)")


def test_known_samples_and_a_stranger_are_at_hand(page: Browser) -> None:
    buttons = "document.querySelectorAll('.sample')"
    page.wait(f"[...{buttons}].every((one) => one.querySelector('img')?.complete)")
    names = page.run(f"[...{buttons}].map((one) => one.querySelector('img').alt)")
    assert names == ["Sample 1", "Sample 2", "Sample 3", "A stranger"]
    assert page.text("#samples-list").split() == ["stranger"]
    for number in range(4):
        asks(page, f"{buttons}[{number}].click()")
        assert tone_of_page(page) in TONES
        assert page.run("document.querySelector('#asked img').naturalWidth") == 8
    assert tone_of_page(page) == "abstain"  # the stranger


def test_a_hit_is_searched_by(page: Browser, address: str, matched: Matched) -> None:
    hit = matched[1]["hits"][1]
    assert f"id {hit['id']}" in page.run("document.querySelectorAll('#hits li')[1].innerText")
    name = page.run("document.querySelectorAll('#hits .open')[1].ariaLabel")
    assert name == f"Search by “\u2068{hit['label']}\u2069”, hit 2"
    asks(page, "document.querySelectorAll('#hits .open')[1].click()")
    expected = fetch(f"{address}/v1/items/{hit['id']}/search?k=100")
    assert page.text("#word") == words_of(expected)
    ids = page.run("[...document.querySelectorAll('#hits .facts dd:first-of-type')].map((id) => id.innerText)")
    assert ids == [one["id"] for one in expected["hits"][:12]]
    assert page.run("document.querySelector('#comparing').hidden")


def test_two_images_are_compared(page: Browser, address: str, tmp_path: Path, matched: Matched) -> None:
    image, _ = matched
    page.run("document.querySelector('#comparing').open = true")
    for number, other in enumerate((image, next(patches()))):
        give(page, tmp_path / f"other-{number}.png", other, to="#other")
        page.wait("!document.querySelector('#compared').hidden")
        first, second = ({"image": base64.b64encode(part).decode()} for part in (image, other))
        body = json.dumps({"first": first, "second": second}).encode()
        expected = fetch(f"{address}/v1/verify", body, "application/json")
        words = {"match": "The same", "abstain": "Not sure", "unknown": "Not the same"}
        sounds, probability = expected["decision"], expected["probability"]
        if (sounds == "match" and probability < 0.8) or (sounds == "unknown" and probability > 0.5):
            sounds, words["perhaps"] = "perhaps", "Perhaps the same"
        page.wait(f"document.querySelector('#pair-word').innerText === {json.dumps(words[sounds])}")
        assert page.run("document.querySelector('#compared').className") == f"decision {sounds}"
        page.run("document.querySelector('#compared').hidden = true")


def test_a_comparison_overtakes_the_one_before(page: Browser, tmp_path: Path, matched: Matched) -> None:
    page.run("document.querySelector('#comparing').open = true")
    page.run("""const before = window.fetch;
        window.asked = 0;
        window.fetch = async (address, options) => {
            if (address === "/v1/verify" && window.asked++ === 0) {
                await new Promise((done) => setTimeout(done, 1000));
                window.late = true;
            }
            return before(address, options);
        };""")
    for number, other in enumerate((matched[0], next(patches()))):
        give(page, tmp_path / f"other-{number}.png", other, to="#other")
        page.wait(f"window.asked > {number}")
    page.wait("!document.querySelector('#compared').hidden")
    second = page.run("document.querySelector('#other-asked img').src")
    page.wait("window.late === true")
    page.run("new Promise((done) => setTimeout(done, 500))")
    assert page.run("document.querySelector('#other-asked img').src") == second
    assert page.complaints == []


def test_a_cosine_below_1_is_not_shown_as_1(page: Browser) -> None:
    shown = [page.call("numbers.cosine", value) for value in (1, 0.5, -0.25, 0.9998, 0.999987721, -0.99999)]
    assert shown == ["1.0000", "0.5000", "−0.2500", "0.9998", "0.999988", "−0.9999900"]


def test_words_of_pairs(page: Browser) -> None:
    pair = {"probability": 0.7, "score": 0.5, "far": 0.01, "kappa": [3.0, 8.0]}
    pair["threshold"] = {"accept_above": 0.6, "kappa_below": 5.0}
    for decision, probability, said, shown in (
        ("match", 0.9, "The same", "match"),
        ("match", 0.55, "Perhaps the same", "perhaps"),
        ("match", 0.299, "Perhaps the same", "perhaps"),
        ("unknown", 0.7, "Perhaps the same", "perhaps"),
        ("unknown", 0.2, "Not the same", "unknown"),
        ("abstain", 0.7, "Not sure", "abstain"),
        (None, None, "No decision", "none"),
    ):
        given = pair | {"decision": decision, "probability": probability}
        for answers, what in ((False, "he same"), (True, "he answer")):
            tone, sign, word, why = page.call("words.aboutPair", given, answers)
            assert (tone, word, bool(sign)) == (shown, said.replace("he same", what), True)
            assert ("κ of one is 3, below 5." if decision == "abstain" else "0.5000") in why


def test_a_gallery_of_identities_is_asked_whether_it_is_here(page: Browser) -> None:
    hit = {"id": "7", "label": "Ann", "score": 0.5, "metadata": {}}
    answer = {"probability": 0.896, "known": 0.9, "p_value": 0.02, "hits": [hit]}
    ann, sure = "“\u2068Ann\u2069”", "89.6\xa0%"
    for share, condition in (
        (0.5, ", where half of all queries have no match"),
        (0.1, ", where 10.0\xa0% of all queries have no match"),
        (None, ""),
    ):
        right = [sure, f"that {ann} is right{condition}"]
        for kind, question, *words in (
            ("classes", "Which is it?", f"It is {ann}", f"Perhaps {ann}, or none of these"),
            ("identities", "Is it here?", f"Yes: {ann}", "Not recognised"),
        ):
            assert page.call("words.questionOf", kind) == question
            decisions = ("match", "unknown", "abstain", None)
            said = [page.call("words.verdictOf", decision, answer, kind)[2] for decision in decisions]
            assert said == [*words, "Not sure", "No decision"]
            summary = {"share_without_match": share}
            shown = [page.call("words.probabilityOf", decision, answer, summary) for decision in decisions]
            assert shown == [right, right, None, None]


def test_a_verdict_is_no_surer_than_it_is_probable(page: Browser) -> None:
    ann = "“\u2068Ann\u2069”"
    expected = {
        ("classes", "match", 0.8): ["match", f"It is {ann}"],
        ("classes", "match", 0.79): ["likely", f"Probably {ann}"],
        ("classes", "match", 0.49): ["perhaps", f"Perhaps {ann}, or none of these"],
        ("classes", "unknown", 0.9): ["perhaps", f"Perhaps {ann}, or none of these"],
        ("classes", "unknown", 0.2): ["perhaps", f"Perhaps {ann}, or none of these"],
        ("classes", "unknown", 0.19): ["unknown", "Probably none of these"],
        ("classes", "abstain", 0.9): ["abstain", "Not sure"],
        ("identities", "match", 0.8): ["match", f"Yes: {ann}"],
        ("identities", "match", 0.55): ["likely", f"Probably: {ann}"],
        ("identities", "match", 0.49): ["perhaps", f"Perhaps: {ann}"],
        ("identities", "unknown", 0.98): ["unknown", "Not recognised"],
        ("identities", "abstain", 0.9): ["abstain", "Not sure"],
    }
    hits = [{"label": "Ann", "score": 0.5, "metadata": {}}]
    for (kind, decision, probability), (tone, words) in expected.items():
        answer = {"probability": probability, "known": probability, "hits": hits}
        assert page.call("words.verdictOf", decision, answer, kind)[::2] == [tone, words]


def test_the_reason_says_what_decides_and_from_where_on(page: Browser) -> None:
    hits = [{"label": "Ann", "score": 0.5, "metadata": {}}]
    script = """
      (async () => {
        const { reason } = await import('/words.js');
        const thresholds = { accept: { row: { rate: 0.01 } }, flag: {}, by: 'knn', name: 'k-NN distance' };
        thresholds.limitOf = () => LIMIT;
        return ['match', 'unknown'].map((decision) => reason(decision, ANSWER, thresholds));
      })()"""
    others = "Of searches with no match in the gallery"
    rest = [f"{others} at most 1\xa0% look that good.", f"{others} 3\xa0% look as good as this one."]
    for accept, statistic, limit, said in (
        ("probability", 0.8, 0.71, ("this probability is above 71.0\xa0%", "this probability were above 71.0\xa0%")),
        ("probability", 0.8, 0.99952, ("this probability is above 99.952\xa0%", "probability were above 99.952\xa0%")),
        ("cosine", -0.2, -0.5, ("the cosine, −0.2000, is above −0.5000", "the cosine, −0.2000, were above −0.5000")),
        ("knn", -0.2, -0.5, ("the k-NN distance, 0.2, is below 0.5", "the k-NN distance, 0.2, were below 0.5")),
        ("mean_cosine", 0.5, 0.2, ("the mean cosine, 0.5000, is above 0.2000", "0.5000, were above 0.2000")),
        ("probability", 0.8, None, ("", "")),
    ):
        answer = {"accept": accept, "statistic": statistic, "false_accept": 0.03, "hits": hits}
        found = page.run(script.replace("ANSWER", json.dumps(answer)).replace("LIMIT", json.dumps(limit)))
        for sentence, what, ending in zip(found, said, rest, strict=True):
            assert what in sentence
            assert sentence.endswith(ending)
            assert (sentence == ending) == (limit is None)


def test_an_abstention_says_how_unusual_the_query_is_and_how_often_that_happens(page: Browser) -> None:
    answer = {"p_value": 0.028, "kappa": 3.0, "hits": [{"label": "Ann", "score": 0.5, "metadata": {}}]}
    often = "At most 5\xa0% of ordinary queries are left undecided like this."
    for by_kappa, why in (
        (False, "of ordinary queries, 2.8\xa0% are as unusual as this one"),
        (True, "its κ, 3, is below 5"),
    ):
        thresholds = {"flag": {"row": {"rate": 0.05, "kappa": 5}}, "byKappa": by_kappa}
        said = page.call("words.reason", "abstain", answer, thresholds)
        assert said == f"This is too unusual to be judged: {why}. {often}"


def test_a_refusal_is_seen_wherever_the_page_is_scrolled_to(page: Browser, address: str, tmp_path: Path) -> None:
    page.show_as(width=390, height=844)
    upload(page, tmp_path / "digit.png", next(digits()))
    page.run("window.scrollTo(0, document.body.scrollHeight)")
    give(page, tmp_path / "letter.png", b"this is no image")
    page.wait("!document.querySelector('#error').hidden")
    assert in_view(page, "#error")
    page.complaints[:] = [complaint for complaint in page.complaints if "415" not in complaint]


def test_a_rate_is_said_to_hold_of_whom_it_was_promised(page: Browser) -> None:
    facts = {"false_accepts": "for questions like the calibration questions; no bound for others"}
    facts["answers_wrong"] = "for queries like the calibration queries, none of them without a match in the gallery"
    whom = f"This rate holds {facts['false_accepts']}."
    answers = " Of the answered queries, at most 5\xa0% are wrong, with a confidence of 95\xa0%: "
    for wrong, moved, more in (
        (None, False, ""),
        (0.05, False, f"{answers}{facts['answers_wrong']}."),
        (0.05, True, ""),
    ):
        summary = {"facts": facts, "threshold": {"wrong": wrong}}
        decisions = ("match", "unknown", "abstain", None)
        said = [page.call("words.promiseOf", decision, summary, moved) for decision in decisions]
        assert said == [f"{whom}{more}", whom, "", ""]


def test_what_tells_new_classes_is_said_with_what_it_rests_on(page: Browser) -> None:
    answer = {"kappa": 3.0, "kappa_capped": False, "p_known": None, "hits": []}
    for unseen, names in (({"p_new": 0.02, "p_in_gallery": 1.0}, ["New class", "Class here"]), (None, [])):
        given = answer | {"unseen": unseen}
        assert [name for name, *_ in page.call("words.facts", "abstain", given, {})] == [*names, "κ"]
        rests = page.call("words.aboutUnseen", given)
        assert ("is a random sample of incoming items" in rests) == bool(names)


def test_a_kappa_at_an_end_of_its_range_is_called_a_bound(page: Browser) -> None:
    for kappa, capped, said in ((1e8, True, "≥ 1.0e+8"), (1e-6, True, "≤ 0.000001"), (3.0, False, "3")):
        answer = {"kappa": kappa, "kappa_capped": capped, "p_known": None, "hits": [], "unseen": None}
        assert page.call("words.facts", "abstain", answer, {})[0][1] == said


def test_a_credible_cap_that_holds_no_hit_is_left_out(page: Browser) -> None:
    answer = {"probability": 0.9, "kappa": 3.0, "kappa_capped": False, "p_known": None, "credible_cosine": 0.9}
    for credible in (True, False):
        hits = [{"label": "", "id": "7", "score": 0.7, "credible": credible, "metadata": {}}]
        given = answer | {"hits": hits}
        names = [name for name, *_ in page.call("words.facts", "abstain", given, {})]
        said = page.call("words.aboutAngles", given, 0.6)
        assert "accept threshold" not in page.call("words.aboutAngles", given, None)
        assert ("Credible cap" in names, "cap" in said) == (credible, credible)
        assert "1 above the accept threshold (filled)" in said
        drawn = page.run(f"""
          (async () => {{
            const place = document.createElement('div');
            (await import('/charts.js')).drawAngles(place, {json.dumps(hits)}, {"0.9" if credible else "null"}, 0.6);
            return [place.querySelectorAll('.cap').length, place.textContent.includes('cap')];
          }})()""")
        assert drawn == [int(credible), credible]


@pytest.mark.parametrize(("low", "high"), [(571.0, 579.0), (250.0, 630.0), (210.0, 480.0), (110.0, 1900.0), (2.1, 9.9)])
def test_kappa_has_a_scale_however_narrow_its_range(page: Browser, low: float, high: float) -> None:
    marks = page.run(f"""
      (async () => {{
        const place = document.createElement('div');
        (await import('/charts.js')).drawKappa(place, {{ counts: [1], edges: [{low}, {high}] }}, {low}, null);
        return [...place.querySelectorAll('[text-anchor=middle]')].map((mark) => mark.textContent);
      }})()""")
    assert 2 <= len(set(marks)) == len(marks) <= 8
    assert all(0.9 * low <= float(mark.replace(",", "")) <= 1.1 * high for mark in marks)


def test_which_doubt_it_is_is_said_in_words(page: Browser, address: str) -> None:
    parts = {"p_known": 0.02, "kappa_aleatoric": 7.0, "kappa_epistemic": 900.0, "kappa": 3.0, "kappa_capped": False}
    answer = {"probability": 0.9, "hits": [], "credible_cosine": 0.5, **parts}
    for doubt in ("I have not seen such a thing", "this could be several things", "", None):
        given = answer | {"doubt": doubt}
        assert page.call("words.doubtOf", given) == (f"“{doubt[0].upper()}{doubt[1:]}.”" if doubt else "")
        meanings = {name: meaning for name, _, meaning in page.call("words.facts", "match", given, {})}
        assert meanings["Seen before"] == "small: I have not seen such a thing"
        assert meanings["κ of the posterior"] == "small: training leaves the embedding open"
        assert meanings["κ of ambiguity"] == "small: this could be several things"
    numbers = page.call("words.facts", "match", answer | {"doubt": None, "p_known": None}, {})
    assert [name for name, *_ in numbers] == ["κ"]


def tab_to(page: Browser, condition: str) -> None:
    """Press the Tab key until an expression holds."""
    for _ in range(60):
        page.press("Tab")
        if page.run(condition):
            return
    raise AssertionError(condition)


def test_the_keyboard_moves_a_threshold_and_the_decision(page: Browser, address: str, tmp_path: Path) -> None:
    calibration = fetch(f"{address}/v1/calibration")
    answers = ((image, search(address, image)) for image in digits())  # unusual enough for the slider
    image, answer = next(each for each in answers if each[1]["decision"] == "unknown" and each[1]["p_value"] < 0.4)
    upload(page, tmp_path / "digit.png", image)
    page.run("document.querySelector('#thresholds').open = true")
    promised = {row["threshold"]: row["rate"] for row in calibration["false_accept"]}
    in_force = promised[calibration["threshold"]["accept_above"]]
    assert in_force <= 0.1
    assert f"{100 * in_force:.2g}\xa0%" in page.text("#accept-rate")
    assert page.text("#accept-promise") == "for known classes; no bound for unseen classes"
    assert page.text("#accept-label") == "Answer where the probability is above"
    recall = {row["threshold"]: row["recall"] for row in calibration["false_accept"]}
    stands = float(page.text("#accept-recall").split("\xa0")[0])
    assert stands == pytest.approx(100 * recall[calibration["threshold"]["accept_above"]], abs=0.05)
    page.run("document.querySelector('#thresholds').open = false")
    tab_to(page, "document.activeElement.innerText === 'Other thresholds'")
    page.press("Enter")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "accept"
    page.press("Home")
    loosest = next(row for row in calibration["false_accept"] if row["rate"] <= 0.5)
    assert float(page.text("#accept-recall").split("\xa0")[0]) == pytest.approx(100 * loosest["recall"], abs=0.05)
    assert f"recall {page.text('#accept-recall')}" in page.run("document.activeElement.ariaValueText")
    page.press("Tab")
    page.press("End")
    assert 45 < float(page.text("#flag-value").split("\xa0")[0]) <= 50
    assert page.text("#word") == "Not sure"
    assert f"under the thresholds in force the answer is: {words_of(answer)}." in page.text("#what-if")
    assert "false flags at most" in page.run("document.activeElement.ariaValueText")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "reset"
    page.press("Enter")
    assert page.text("#word") == words_of(answer)
    assert page.run("document.querySelector('#what-if').hidden")


def test_thresholds_other_than_those_in_force(page: Browser) -> None:
    calibration = {
        "threshold": {"accept": "probability", "accept_above": 0.7, "flag": "kappa", "kappa_below": 20.0, "ood": 0.2},
        "false_accept": [
            {"threshold": 0.6, "rate": 0.3, "recall": 0.9},
            {"threshold": 0.7, "rate": 0.1, "recall": 0.8},
            {"threshold": 0.8, "rate": 0.05, "recall": 0.5},
        ],
        "false_flag": [{"kappa": 10.0, "rate": 0.1}, {"kappa": 20.0, "rate": 0.2}, {"kappa": 30.0, "rate": 0.3}],
    }
    answer = {"decision": "served", "kappa": 20.0, "p_value": 0.2, "hits": [{}], "statistic": 0.8, "false_accept": 0.2}
    answer["threshold"] = calibration["threshold"]
    script = """
      (async () => {
        const { Thresholds } = await import('/thresholds.js');
        const thresholds = new Thresholds(CALIBRATION);
        return [[1, 1], [0, 1], [2, 1], [0, 2], [0, 0], [1, 0]].map(([accept, flag]) => {
          thresholds.accept.position = accept;
          thresholds.flag.position = flag;
          return thresholds.decide(ANSWER);
        });
      })()""".replace("ANSWER", json.dumps(answer))
    by_kappa = page.run(script.replace("CALIBRATION", json.dumps(calibration)))
    assert by_kappa == ["served", "match", "unknown", "abstain", "match", "match"]
    calibration["threshold"]["flag"] = "knn"
    by_rate = page.run(script.replace("CALIBRATION", json.dumps(calibration)))
    assert by_rate == ["served", "abstain", "abstain", "abstain", "match", "match"]
    calibration["threshold"]["flag"] = "kappa"
    of_vectors = {**answer, "statistic": 0.65, "threshold": {"accept": "probability", "accept_above": 0.61}}
    script = script.replace(json.dumps(answer), json.dumps(of_vectors))
    by_another = page.run(script.replace("CALIBRATION", json.dumps(calibration)))
    assert by_another == ["served", "match", "unknown", "abstain", "match", "match"]


def test_everything_is_reached_by_tab_and_has_a_name(page: Browser) -> None:
    page.wait("[...document.querySelectorAll('.sample')].every((one) => one.querySelector('img'))")
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(
            page.run("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
        if seen[-1] == "SUMMARY":
            page.press("Enter")
    assert seen[:8] == ["skip", "file", "folder", *["sample"] * 4, "draw-search"]
    assert {"SUMMARY", "accept", "flag"} <= set(seen)
    nodes = page("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"main", "status", "slider", "button", "heading", "region"} <= roles
    for node in nodes:
        if not node["ignored"] and node["role"]["value"] in ("slider", "button", "textbox", "img", "image"):
            assert node["name"]["value"], node


def test_images_are_dropped_pasted_and_drawn(page: Browser) -> None:
    made = (
        "const made = new OffscreenCanvas(9, 9), data = new DataTransfer(); made.getContext('2d').fillRect(0, 0, 9, 9);"
        "data.items.add(new File([await made.convertToBlob()], 'a.png', {type: 'image/png'}));"
    )
    for event in (
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})",
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true})",
    ):
        asks(page, f"(async () => {{ {made} document.body.dispatchEvent({event}); }})()")
        assert tone_of_page(page) in TONES
    page.run("document.querySelector('#draw-search').click()")
    page.wait("document.querySelector('#error').innerText === 'Nothing is drawn yet.'")
    x, y = page.run("(({x, y}) => [x, y])(document.querySelector('#canvas').getBoundingClientRect())")
    page.drag((x + 110, y + 20), (x + 110, y + 100), (x + 110, y + 200), (x + 110, y + 200))
    asks(page, "document.querySelector('#draw-search').click()")
    assert tone_of_page(page) in TONES
    assert page.run("document.querySelector('#error').hidden")


def test_refusals_are_said_in_words(page: Browser, tmp_path: Path) -> None:
    give(page, tmp_path / "text.png", b"hello")
    page.wait("!document.querySelector('#error').hidden")
    assert "Allowed: image/jpeg, image/png" in page.text("#error")
    assert page.text("#word") == "No answer"
    give(page, tmp_path / "large.png", bytes(11 * 2**20))
    page.wait("document.querySelector('#error').innerText.includes('11 MiB')")
    assert [complaint for complaint in page.complaints if "415" not in complaint] == []
    page.complaints.clear()


def test_what_the_gallery_holds_is_text(page: Browser, address: str, tmp_path: Path) -> None:
    image = encoded(Image.radial_gradient("L").resize((8, 8)))
    markup = "<img src=x onerror=document.title='taken'>"
    fetch(f"{address}/v1/items?id=markup&label={urllib.parse.quote(markup)}", image)
    upload(page, tmp_path / "gradient.png", image)
    assert "<img src=x" in page.text("#hits li")
    assert page.run("document.title") == "Which is it? – lam"
    stored = {"id": "17", "metadata": {"text": "hidden", markup: markup, "many": [1, {"a": 2}], "long": "x" * 200}}
    stored["metadata"] |= {"turned": "\u202egnp", "fifth": 5, "sixth": None}
    cut = f"{markup[:39]}…"
    assert page.call("words.metadataOf", stored) == [
        *[["id", "17"], [cut, markup], ["many", '[1,{"a":2}]'], ["long", "x" * 79 + "…"], ["turned", "\ufffdgnp"]],
        ["and", "2 more"],
    ]
    fetch(f"{address}/v1/items/markup", method="DELETE")


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("W" * 1024, "W" * 39 + "…"),
        ("W " * 511 + "W", "W " * 19 + "W…"),
        ("evil \u202egnp.exe\u202c \u2069\u2066", "evil \ufffdgnp.exe\ufffd \ufffd\ufffd"),
        ("line\nbreak\ttab", "line\ufffdbreak\ufffdtab"),
        ("שלום 3", "שלום 3"),
        ("🙂" * 70, "🙂" * 39 + "…"),
    ],
    ids=["one word", "many words", "turned round", "broken", "from right to left", "pictures"],
)
def test_no_label_breaks_the_page(page: Browser, address: str, tmp_path: Path, label: str, shown: str) -> None:
    image = encoded(Image.radial_gradient("L").resize((9, 9)))
    assert fetch(f"{address}/v1/items?id=odd&label={urllib.parse.quote(label)}", image)["label"] == label
    page.show_as(width=340)
    upload(page, tmp_path / "gradient.png", image)
    assert page.run("document.querySelector('#hits li bdi').textContent") == shown
    assert page.call("words.named", {"label": label, "metadata": {}}) == f"“\u2068{shown}\u2069”"
    assert page.run("document.documentElement.scrollWidth") <= 340
    assert page.run("Math.max(...[...document.querySelectorAll('#hits li')].map((card) => card.offsetHeight))") < 500
    assert not set("\u202a\u202b\u202c\u202d\u202e") & set(page.run("document.body.textContent"))
    fetch(f"{address}/v1/items/odd", method="DELETE")


def test_hits_say_what_they_were_made_of(page: Browser, matched: Matched) -> None:
    for images, uncertain, metadata, said in (
        (1, None, {}, ""),
        (1, True, {}, " (uncertain: below the flag)"),
        (3, False, {}, " of 3 images"),
        (3, False, {"text": "a cat"}, " of 3 texts"),
    ):
        hit = {"images": images, "uncertain": uncertain, "metadata": metadata}
        assert page.call("words.aboutImages", hit) == said
    shown = page.run("[...document.querySelectorAll('#hits li')].map((card) => card.innerText)")
    assert ["uncertain" in card for card in shown] == [hit["uncertain"] for hit in matched[1]["hits"][:12]]


def test_what_is_promised_of_hits_is_said_where_it_is_promised(page: Browser) -> None:
    answer = {"hits": [{}, {}, {}]}
    for depth, said in (
        (1, "as the first item."),
        (3, "among the first 3 items."),
        (4, None),  # there are fewer hits
        (None, None),
    ):
        for decision in ("match", "unknown", "abstain"):
            summary = {"depth": depth, "threshold": {"conformal_miss": 0.05}}
            found = page.call("words.aboutSet", decision, answer, summary)
            if said is None or decision != "match":
                assert found == ""
            else:
                assert found.endswith(f" at least 95.0\xa0% have one {said}")


def test_a_stale_calibration_is_mended_without_a_restart(page: Browser) -> None:
    said = page.call("words.aboutStale", 90, {"gallery_size": 60})
    assert "Run “lam calibrate RUN”, send the service a SIGHUP, and reload" in said
    watched = [page.call("words.aboutWatch", "holds", is_stale) for is_stale in (False, True)]
    assert watched == ["The promise holds.", ""]


def test_a_calibration_and_a_picture_that_come_later_are_shown(tab: Browser, served_run: Path, tmp_path: Path) -> None:
    """While the page stays open, the run is calibrated twice, and an item is replaced."""
    (tmp_path / "digit.png").write_bytes(next(digits()))
    thresholds = "document.querySelector('#thresholds').hidden"
    sizes = "[...document.querySelectorAll('#hits img')].map((image) => image.naturalWidth)"
    shutil.move(served_run / "calibration", tmp_path / "calibration")
    with started("lam", "serve", run=served_run) as (process, address, _):
        opened(tab, address)
        tab.choose("#file", tmp_path / "digit.png")
        answered(tab)
        assert tab.run(thresholds)
        assert not tab.run("document.querySelector('#uncalibrated').hidden")
        assert 48 not in tab.run(sizes)
        for flag, far in (("combined", 0.2), ("kappa", 0.3)):
            targets = Targets(far=far, ood=0.1, conformal_miss=0.1)
            if not (served_run / "calibration").exists():
                shutil.move(tmp_path / "calibration", served_run / "calibration")
            calibrate_run(served_run, CalibrationOptions(targets=targets, flag=flag), progress=False)
            process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 20
            while (threshold := fetch(f"{address}/v1/model")["threshold"] or {}).get(
                "far"
            ) != far and time.monotonic() < until:
                time.sleep(0.05)
            tab.choose("#file", tmp_path / "digit.png")
            by, above = threshold["accept"], threshold["accept_above"]
            shown = f"(await import('/words.js')).statisticOf('{by}', {above})[1]"
            tab.wait(f"(async () => document.querySelector('#accept-value').textContent.startsWith({shown}))()")
            answered(tab)
            assert not tab.run(thresholds)
            assert tab.run("document.querySelector('#uncalibrated').hidden")
            assert ("κ is below" in tab.run("document.querySelector('#flag-label').textContent")) == (flag == "kappa")
            assert tab.text("#word") == words_of(search(address, (tmp_path / "digit.png").read_bytes()))
        best = search(address, (tmp_path / "digit.png").read_bytes())["hits"][0]["id"]
        with Image.open(tmp_path / "digit.png") as image:
            larger = encoded(image.resize((48, 48), Image.Resampling.NEAREST))
        fetch(f"{address}/v1/items/{best}", larger, method="PUT")
        tab.choose("#file", tmp_path / "digit.png")
        tab.wait(f"{sizes}.includes(48)")
        answered(tab)
    assert tab.complaints == []


def test_a_file_that_is_too_large_leaves_what_is_asked(page: Browser) -> None:
    page.run("""(async () => {
        const canvas = new OffscreenCanvas(9, 9);
        canvas.getContext("2d").fillRect(0, 0, 9, 9);
        for (const part of [await canvas.convertToBlob(), new Uint8Array(11 * 2 ** 20)]) {
            const data = new DataTransfer();
            data.items.add(new File([part], "a.png", { type: "image/png" }));
            document.body.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }
    })()""")
    answered(page)
    assert tone_of_page(page) in TONES
    assert "11 MiB" in page.text("#error")


def choose_folder(page: Browser, folder: Path) -> None:
    """Give all files of a folder to the input of folders, and wait until each has its row.

    The protocol of Chromium cannot choose a folder, so the input becomes one for several files.
    """
    page.run("document.querySelector('#folder').removeAttribute('webkitdirectory')")
    page.run("document.querySelector('#folder').multiple = true")
    page.choose("#folder", *sorted(folder.iterdir()))
    page.wait("/done|stopped/.test(document.querySelector('#bulk-progress').textContent)")


def test_a_folder_becomes_a_table_and_a_csv(page: Browser, address: str, tmp_path: Path) -> None:
    folder, saved = tmp_path / "folder", tmp_path / "saved"
    folder.mkdir()
    saved.mkdir()
    images = [*itertools.islice(digits(), 60), *itertools.islice(patches(), 20)]
    for number, image in enumerate(images):
        (folder / f"{number:02}.png").write_bytes(image)
    (folder / "=1+1.png").write_bytes(images[0][:60])
    (folder / "notes.txt").write_text("no image")
    choose_folder(page, folder)
    assert page.text("#bulk-progress") == "81 of 81 images, done; left out: 1 other file."
    shown = page.run(
        "[...document.querySelectorAll('#bulk-rows tr')].map((row) => [...row.cells].map((c) => c.innerText))"
    )
    page("Page.setDownloadBehavior", behavior="allow", downloadPath=str(saved))
    page.run("document.querySelector('#bulk-csv').click()")
    until((saved / "decisions.csv").exists)
    with (saved / "decisions.csv").open(encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "decision", "label", "probability", "kappa", "error"]
    assert len(rows) == len(shown) == 81
    by_name = {row[0]: (row, cells) for row, cells in zip(rows, shown, strict=True)}
    row, cells = by_name.pop("'=1+1.png")
    assert (row[1], cells[0]) == ("error", "=1+1.png")
    assert "damaged" in row[5]
    for number, image in enumerate(images):
        (row, cells), answer = by_name.pop(f"{number:02}.png"), search(address, image)
        assert row[1] == answer["decision"]
        assert row[2] == (answer["hits"][0]["label"] if answer["decision"] == "match" else "")
        assert float(row[3]) == pytest.approx(answer["probability"], rel=1e-2, abs=1e-4)
        assert float(row[4]) == pytest.approx(answer["kappa"], rel=1e-3)
        words = {"match": "✓ match", "unknown": "✕ unknown", "abstain": "? not sure"}
        assert cells[1:3] == [words[answer["decision"]], row[2]]
    assert not by_name
    page.screenshot(tmp_path / "bulk.png")
    assert page.run("document.documentElement.scrollWidth") <= 1180


def test_a_dropped_folder_is_read_to_its_end(page: Browser) -> None:
    """Also if a reader gives the entries in several parts, and for nested folders."""
    script = """(async () => {
        const file = (name) => ({ isFile: true, fullPath: name, file: (done) => done(new File(["x"], name)) });
        const folder = (...turns) => ({ isFile: false, isDirectory: true,
            createReader: () => ({ readEntries: (done) => done(turns.shift() ?? []) }) });
        const { filesOf, imagesOf, batchesOf } = await import('/bulk.js');
        const item = (entry) => ({ webkitGetAsEntry: () => entry });
        const inner = folder([file("/a/b/3.JPG")], [file("/a/b/4.gif")]);
        const files = await filesOf({ items: [item(folder([file("/a/1.png"), inner], [file("/a/2.webp")]))] });
        const [images, others] = imagesOf(files);
        const sizes = (limits) => batchesOf(images, limits).map((batch) => batch.length);
        return [images.map(({ path }) => path), others, filesOf({ items: [item(file("/1.png"))] }),
            sizes({ max_bytes: 2 ** 20, max_batch: 2 }), sizes({ max_bytes: 2 ** 16 + 110, max_batch: 64 })];
    })()"""
    assert page.run(script) == [["a/1.png", "a/2.webp", "a/b/3.JPG"], 1, None, [2, 1], [1, 1, 1]]


def test_no_cell_of_the_csv_is_a_formula(page: Browser) -> None:
    names = ["=1", "+1", "-1", "@a", "\t=1", " =1", 'a "b", c\nd', "plain"]
    row = {"decision": "match", "probability": 0.5, "kappa": -1, "error": ""}
    text = page.call("bulk.csvOf", [{"file": name, "label": name, **row} for name in names])
    assert text.startswith("\ufeff")
    found = list(csv.DictReader(io.StringIO(text[1:])))
    assert [row["file"] for row in found] == [f"'{name}" for name in names[:6]] + names[6:]
    assert {(row["probability"], row["kappa"]) for row in found} == {("0.5", "-1")}


def test_a_folder_without_images_says_so(page: Browser) -> None:
    page.run("""(() => {
        const data = new DataTransfer();
        data.items.add(new File(["x"], "a.txt"));
        const input = document.querySelector("#folder");
        input.files = data.files;
        input.dispatchEvent(new Event("change"));
    })()""")
    assert "no JPEG, PNG or WebP file" in page.text("#error")


@pytest.mark.usefixtures("matched")
def test_it_fits_narrow_screens(page: Browser) -> None:
    page.show_as(scheme="dark", width=340)
    page.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert page.run("document.documentElement.scrollWidth") <= 340
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"


def test_on_a_phone_the_answer_is_in_view(page: Browser, address: str, tmp_path: Path) -> None:
    page.show_as(width=390, height=844)
    page.run("scrollTo(0, 0)")
    image, _ = first(address, digits(), "match")
    upload(page, tmp_path / "digit.png", image)
    for _ in range(2):
        for part in ("#word", "#probability", "#asked img"):
            assert in_view(page, part), part
        asks(page, "document.querySelectorAll('#hits .open')[5].click()")


def test_texts_are_asked_compared_and_shown(tab: Browser, served_texts: Path) -> None:
    with serving(served_texts, "tests.service.serve_quickly") as address:
        opened(tab, address)
        sentences = tab.run("[...document.querySelectorAll('.sample')].map((one) => one.innerText)")
        assert len(sentences) == 4
        assert [sentence.startswith("where is") for sentence in sentences] == [True, True, True, False]
        assert tab.text("#samples-list li:last-child span") == "stranger"
        for script in ("document.querySelector('.sample').click()", "document.querySelector('#asking button').click()"):
            tab.run(f"document.querySelector('#text').value = {json.dumps(sentences[1])}")
            asks(tab, script)
            assert tone_of_page(tab) in TONES
            assert tab.run("document.querySelectorAll('#hits .picture.text').length") == 12
        assert tab.text("#asked") == sentences[1]
        tab.run("document.querySelector('#comparing').open = true")
        tab.run(f"document.querySelector('#other-text').value = {json.dumps(sentences[1])}")
        tab.run("document.querySelector('#other-asking button').click()")
        tab.wait("!document.querySelector('#compared').hidden")
        assert tab.text("#pair-word") in ("The answer", "Perhaps the answer", "Not sure", "No decision")
        assert tab.text("#other-asked") == sentences[1]
        assert (tab.text("#comparing-title"), tab.text("#other-title")) == ("Compare it with an answer", "The answer")
        assert asks(tab, "document.querySelector('#hits .open').click()") == "Items like it"
        assert tone_of_page(tab) == "none"
        tab.run("document.querySelector('#thresholds').open = true")
        tab.run("document.querySelector('#accept').value = 0")
        tab.run("document.querySelector('#accept').dispatchEvent(new Event('input'))")
        assert tab.text("#word") == "Items like it"
        for hidden in ("#probability", "#promise", "#what-if", "#uncalibrated"):
            assert tab.run(f"document.querySelector('{hidden}').hidden"), hidden
        assert tab.text("#hits-text") == ""
        assert tab.complaints == []


def test_without_a_calibration_it_says_how_to_make_one(
    tab: Browser, run_copy: Path, tmp_path: Path, png: bytes
) -> None:
    with serving(run_copy, LAM_API_KEY=KEY) as address:
        tab.show_as()
        tab.open(address)
        tab.wait("!document.querySelector('#key-form').hidden")
        assert tab.run("document.activeElement.id") == "key"
        assert tab.run("document.querySelector('#error').hidden")
        for key in ("wrong", KEY):
            tab.run(f"document.querySelector('#key').value = '{key}'")
            tab.press("Enter")
            tab.wait("!document.querySelector('#error').hidden || !document.querySelector('#desk').hidden")
            if key == "wrong":
                assert tab.text("#error") == "That is not the key of this service."
        tab.wait("!document.querySelector('#desk').hidden")
        assert "lam calibrate RUN" in tab.text("#uncalibrated")
        assert tab.run("document.querySelector('#thresholds').hidden")
        assert upload(tab, tmp_path / "image.png", png) == "No decision"
        assert tab.run("document.querySelectorAll('#hits img').length") == 12
        assert [complaint for complaint in tab.complaints if "401" not in complaint] == []
        tab.complaints.clear()


def test_the_page_asks_no_other_host_and_puts_in_text_only(address: str) -> None:
    for name in ("", *(file.name for file in PAGE.iterdir())):
        with urllib.request.urlopen(f"{address}/{name}") as response:
            assert "unsafe" not in response.headers["content-security-policy"]
            assert response.headers["cache-control"] == "no-cache"
            content = response.read().decode().replace("http://www.w3.org/2000/svg", "")
        for forbidden in ("http:", "https:", "innerHTML", "insertAdjacentHTML", "document.write", "eval(", " style="):
            assert forbidden not in content, (name, forbidden)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["kappa", "combined"])
def test_the_demo_from_start_to_end(flag: Any, tab: Browser, tmp_path: Path) -> None:
    """The demo unchanged: most digits match, most patches of photographs do not, and sliders agree with decisions."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["demo", "--quiet", f"--output={tmp_path / 'run'}"]) == 0
    calibrate_run(tmp_path / "run", CalibrationOptions(targets=Targets(far=0.01), flag=flag), progress=False)
    with serving(tmp_path / "run") as address:
        opened(tab, address)
        shares = []
        for images in (digits(), patches()):
            words = []
            for number, image in zip(range(30), images, strict=False):
                tab.run("document.querySelector('#word').textContent = 'Nothing asked yet'")
                words.append(upload(tab, tmp_path / f"{number}.png", image))
                assert words[-1] == words_of(search(address, image))
            shares.append(sum(word.startswith("It is") for word in words) / 30)
            tab.screenshot(tmp_path / f"{len(shares)}.png")
        assert shares[0] > 0.8
        assert shares[1] < 0.2
        assert tab.complaints == []


@pytest.mark.usefixtures("matched")
def test_an_answer_can_be_judged(page: Browser, address: str) -> None:
    page.wait("!document.querySelector('#watch').hidden")
    assert page.text("#watch").startswith("The promise ")
    judgements = page.run("[...document.querySelectorAll('#judging button')].map(({innerText: text}) => text)")
    assert judgements == ["Right", "Wrong: the gallery holds another", "Wrong: the gallery does not hold it"]
    page.run("document.querySelector('#judging button').click()")
    page.wait("!document.querySelector('#judged').hidden")
    assert page.run("document.querySelector('#judging').hidden")
    tests = {test["name"]: test["n"] for test in fetch(f"{address}/v1/model")["promise"]["tests"]}
    assert tests["wrong"] == 1
