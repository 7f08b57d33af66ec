"""The page in headless Chromium: what it shows is what the service answers, by mouse, by keyboard, and in words."""

import contextlib
import io
import json
import shutil
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
from lam.runs.calibrate import calibrate_run
from lam.service.app import PAGE
from tests.conftest import FinishedRun
from tests.service.browser import CHROMIUM, Browser, browsing
from tests.service.conftest import encoded
from tests.service.serving import started

pytestmark = pytest.mark.long

WORDS = {"match": "Match", "unknown": "No match", "abstain": "Not sure"}
KEY = "a-key"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@contextlib.contextmanager
def serving(run: Path, **environment: str) -> Iterator[str]:
    """`lam serve` as a process of its own; gives its address."""
    with started("lam", "serve", run=run, **environment) as (_, address, _):
        yield address


def search(address: str, body: bytes) -> dict[str, Any]:
    request = urllib.request.Request(f"{address}/v1/search?k=100", body, {"Content-Type": "image/png"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


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


def first(address: str, images: Iterator[bytes], decision: str) -> tuple[bytes, dict[str, Any]]:
    """The first image that gets such a decision."""
    for image in images:
        answer = search(address, image)
        if answer["decision"] == decision:
            return image, answer
    raise AssertionError("no image got such a decision")


@pytest.fixture(scope="module")
def address(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The finished run, served; its features tell photographs from digits, which its κ after two epochs does not."""
    run = Path(shutil.copytree(finished_run.folder, tmp_path_factory.mktemp("page") / "run"))
    calibrate_run(run, targets=Targets(far=0.1, ood=0.1, conformal_miss=0.1), flag="combined", progress=False)
    with serving(run) as found:
        yield found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(tab: Browser, address: str) -> Iterator[Browser]:
    """The page, opened anew; afterwards nothing may have gone wrong in it."""
    tab.complaints.clear()
    tab.show_as()
    tab.open(address)
    tab.wait("!document.querySelector('#desk').hidden")
    yield tab
    assert tab.complaints == []


def answered(page: Browser) -> str:
    """The word of the decision, once hits and their pictures are there."""
    page.wait("!document.querySelector('#answer').ariaBusy")
    page.wait("document.querySelector('#word').innerText !== 'Nothing asked yet'")
    page.wait("[...document.querySelectorAll('.picture')].every(({firstChild: i}) => i && (!i.tagName || i.complete))")
    return page.text("#word")


def upload(page: Browser, file: Path, image: bytes) -> str:
    file.write_bytes(image)
    page.choose("#file", file)
    return answered(page)


@needs_chromium
@pytest.mark.parametrize(("images", "decision"), [(digits, "match"), (digits, "unknown"), (patches, "abstain")])
def test_a_digit_and_a_photograph_get_what_the_service_says(
    page: Browser, address: str, tmp_path: Path, images: Callable[[], Iterator[bytes]], decision: str
) -> None:
    image, _ = first(address, images(), decision)
    assert upload(page, tmp_path / "image.png", image) == WORDS[decision]
    assert page.run("document.querySelector('#decision').className") == f"decision {decision}"


@needs_chromium
def test_an_answer_is_shown_in_numbers_and_pictures(page: Browser, address: str, tmp_path: Path) -> None:
    image, answer = first(address, digits(), "match")
    upload(page, tmp_path / "digit.png", image)
    facts = page.text("#facts")
    for name in ("Probability", "κ", "Best cosine", "Credible cap"):
        assert name in facts
    assert f"{answer['hits'][0]['score']:.4f}" in facts
    assert "that the first hit is right, if it has a match" in facts
    assert "Of queries like those it was calibrated on, with no match in the gallery, at most" in page.text("#reason")
    assert f"among the first {[hit['conformal'] for hit in answer['hits']].count(True)} items" in page.text(
        "#rejected-text"
    )
    assert page.run("document.querySelectorAll('#kappa-chart rect').length") == 40
    assert page.run("document.querySelectorAll('#angle-chart circle').length") == len(answer["hits"])
    assert "of the calibration" in page.text("#kappa-text")
    assert page.run("[...document.querySelectorAll('#hits img')].every(({naturalWidth}) => naturalWidth === 8)")
    rejected = next(number for number, hit in enumerate(answer["hits"], 1) if not hit["accepted"])
    assert f"number {rejected}, " in page.text("#rejected-text")
    assert f"#{rejected}" in page.text("#hits .nearest")
    assert page.run("document.querySelectorAll('#hits li.nearest').length") == 1


@needs_chromium
def test_the_keyboard_moves_a_threshold_and_the_decision(page: Browser, address: str, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{address}/v1/calibration") as response:
        calibration = json.load(response)
    image, _ = first(address, digits(), "match")
    upload(page, tmp_path / "digit.png", image)
    promised = {row["cosine"]: row["rate"] for row in calibration["false_accept"]}
    in_force = promised[calibration["threshold"]["accept_above"]]
    assert in_force <= 0.1
    assert f"{100 * in_force:.2g}\xa0%" in page.text("#accept-rate")
    assert page.text("#accept-promise") == "of classes like those it was trained on; strangers are not promised"
    recall = {row["cosine"]: row["recall"] for row in calibration["false_accept"]}
    stands = float(page.text("#accept-recall").split("\xa0")[0])
    assert stands == pytest.approx(100 * recall[calibration["threshold"]["accept_above"]], abs=0.05)
    for _ in range(30):
        page.press("Tab")
        if page.run("document.activeElement.id") == "accept":
            break
    page.press("Home")
    loosest = next(row for row in calibration["false_accept"] if row["rate"] <= 0.5)
    assert float(page.text("#accept-recall").split("\xa0")[0]) == pytest.approx(100 * loosest["recall"], abs=0.05)
    assert f"recall {page.text('#accept-recall')}" in page.run("document.activeElement.ariaValueText")
    page.press("Tab")
    page.press("End")
    assert 45 < float(page.text("#flag-value").split("\xa0")[0]) <= 50
    assert page.text("#word") == "Not sure"
    assert "under the thresholds in force the answer is “Match”" in page.text("#what-if")
    assert "false flags at most" in page.run("document.activeElement.ariaValueText")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "reset"
    page.press("Enter")
    assert page.text("#word") == "Match"
    assert page.run("document.querySelector('#what-if').hidden")
    assert search(address, image)["decision"] == "match"


@needs_chromium
def test_thresholds_other_than_those_in_force(page: Browser) -> None:
    calibration = {
        "threshold": {"accept_above": 0.7, "flag": "kappa", "kappa_below": 20.0, "ood": 0.2},
        "false_accept": [
            {"cosine": 0.6, "rate": 0.3, "recall": 0.9},
            {"cosine": 0.7, "rate": 0.1, "recall": 0.8},
            {"cosine": 0.8, "rate": 0.05, "recall": 0.5},
        ],
        "false_flag": [{"kappa": 10.0, "rate": 0.1}, {"kappa": 20.0, "rate": 0.2}, {"kappa": 30.0, "rate": 0.3}],
    }
    answer = {"decision": "served", "kappa": 20.0, "p_value": 0.2, "hits": [{"score": 0.8}]}
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


@needs_chromium
def test_everything_is_reached_by_tab_and_has_a_name(page: Browser) -> None:
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.className"))
    assert seen[:4] == ["skip", "file", "draw-search", "draw-clear"]
    assert {"accept", "flag"} <= set(seen)
    nodes = page("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"main", "status", "slider", "button", "heading", "region"} <= roles
    for node in nodes:
        if not node["ignored"] and node["role"]["value"] in ("slider", "button", "textbox", "img", "image"):
            assert node["name"]["value"], node


@needs_chromium
def test_images_are_dropped_pasted_and_drawn(page: Browser) -> None:
    made = (
        "const made = new OffscreenCanvas(9, 9), data = new DataTransfer(); made.getContext('2d').fillRect(0, 0, 9, 9);"
        "data.items.add(new File([await made.convertToBlob()], 'a.png', {type: 'image/png'}));"
    )
    for event in (
        "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})",
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true})",
    ):
        page.run("document.querySelector('#word').textContent = 'Nothing asked yet'")
        page.run(f"(async () => {{ {made} document.body.dispatchEvent({event}); }})()")
        assert answered(page) in WORDS.values()
    page.run("document.querySelector('#draw-search').click()")
    page.wait("document.querySelector('#error').innerText === 'Nothing is drawn yet.'")
    page.run("document.querySelector('#word').textContent = 'Nothing asked yet'")
    x, y = page.run("(({x, y}) => [x, y])(document.querySelector('#canvas').getBoundingClientRect())")
    page.drag((x + 110, y + 20), (x + 110, y + 100), (x + 110, y + 200), (x + 110, y + 200))
    page.run("document.querySelector('#draw-search').click()")
    assert answered(page) in WORDS.values()
    assert page.run("document.querySelector('#error').hidden")


@needs_chromium
def test_refusals_are_said_in_words(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_bytes(b"hello")
    page.choose("#file", tmp_path / "text.png")
    page.wait("!document.querySelector('#error').hidden")
    assert "no image of an allowed format. Allowed: image/jpeg" in page.text("#error")
    assert page.text("#word") == "No answer"
    (tmp_path / "large.png").write_bytes(bytes(11 * 2**20))
    page.choose("#file", tmp_path / "large.png")
    page.wait("document.querySelector('#error').innerText.includes('11 MiB')")
    assert [complaint for complaint in page.complaints if "415" not in complaint] == []
    page.complaints.clear()


@needs_chromium
def test_what_the_gallery_holds_is_text(page: Browser, address: str, tmp_path: Path) -> None:
    image = encoded(Image.radial_gradient("L").resize((8, 8)))
    label = "%3Cimg%20src=x%20onerror=document.title='taken'%3E"
    request = urllib.request.Request(
        f"{address}/v1/items?id=markup&label={label}", image, {"Content-Type": "image/png"}, method="POST"
    )
    urllib.request.urlopen(request).close()
    upload(page, tmp_path / "gradient.png", image)
    assert "<img src=x" in page.text("#hits li")
    assert page.run("document.title") == "lam: is it in the gallery?"
    urllib.request.urlopen(urllib.request.Request(f"{address}/v1/items/markup", method="DELETE")).close()


@needs_chromium
@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("W" * 1024, "W" * 39 + "…"),
        ("W " * 512, "W " * 19 + "W…"),
        ("evil \u202egnp.exe\u202c \u2069\u2066", "evil \ufffdgnp.exe\ufffd \ufffd\ufffd"),
        ("line\nbreak\ttab\0", "line\ufffdbreak\ufffdtab\ufffd"),
        ("שלום 3", "שלום 3"),
        ("🙂" * 70, "🙂" * 39 + "…"),
    ],
    ids=["one word", "many words", "turned round", "broken", "from right to left", "pictures"],
)
def test_no_label_breaks_the_page(page: Browser, address: str, tmp_path: Path, label: str, shown: str) -> None:
    image = encoded(Image.radial_gradient("L").resize((9, 9)))
    path = f"{address}/v1/items?id=odd&label={urllib.parse.quote(label)}"
    with urllib.request.urlopen(urllib.request.Request(path, image, {"Content-Type": "image/png"})) as response:
        assert json.load(response)["label"] == label
    page.show_as(width=340)
    upload(page, tmp_path / "gradient.png", image)
    assert page.run("document.querySelector('#hits li bdi').textContent") == shown
    script = f"(async () => (await import('/words.js')).named({json.dumps({'label': label})}))()"
    assert page.run(script) == f"“\u2068{shown}\u2069”"
    assert page.run("document.documentElement.scrollWidth") <= 340
    assert page.run("Math.max(...[...document.querySelectorAll('#hits li')].map((card) => card.offsetHeight))") < 500
    assert not set("\u202a\u202b\u202c\u202d\u202e") & set(page.run("document.body.textContent"))
    urllib.request.urlopen(urllib.request.Request(f"{address}/v1/items/odd", method="DELETE")).close()


@needs_chromium
def test_hits_say_what_they_were_made_of(page: Browser, address: str, tmp_path: Path) -> None:
    hits = [{"images": 1, "uncertain": None}, {"images": 1, "uncertain": True}, {"images": 3, "uncertain": False}]
    script = f"(async () => {json.dumps(hits)}.map((await import('/words.js')).aboutImages))()"
    assert page.run(script) == ["", " (uncertain: below the flag)", " of 3 images"]
    image, answer = first(address, digits(), "match")
    upload(page, tmp_path / "digit.png", image)
    shown = page.run("[...document.querySelectorAll('#hits li')].map((card) => card.innerText)")
    assert ["uncertain" in card for card in shown[:11]] == [hit["uncertain"] for hit in answer["hits"][:11]]


@needs_chromium
def test_what_is_promised_of_hits_is_said_where_it_is_promised(page: Browser) -> None:
    answer = {"hits": [{}, {}, {}]}
    for depth, said in (
        (1, "as the first item."),
        (3, "among the first 3 items."),
        (4, None),  # so many hits are not there
        (None, None),
    ):
        given = json.dumps([answer, {"depth": depth, "threshold": {"conformal_miss": 0.05}}])
        found = page.run(f"(async () => (await import('/words.js')).aboutSet(...{given}))()")
        assert (found or None) is said or found.endswith(f" at least 95.0\xa0% have one {said}")


@needs_chromium
def test_a_stale_calibration_is_mended_without_a_restart(page: Browser) -> None:
    script = "(async () => (await import('/words.js')).aboutStale(90, {gallery_size: 60}))()"
    assert "Run “lam calibrate RUN”, send the service a SIGHUP, and reload" in page.run(script)


@needs_chromium
def test_it_fits_narrow_screens(page: Browser, address: str, tmp_path: Path) -> None:
    image, _ = first(address, digits(), "match")
    upload(page, tmp_path / "digit.png", image)
    page.show_as(scheme="dark", width=340)
    assert page.run("document.documentElement.scrollWidth") <= 340
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"


@needs_chromium
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


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["kappa", "combined"])
def test_the_demo_from_start_to_end(flag: Any, tab: Browser, tmp_path: Path) -> None:
    """The demo as it is: most digits match, most patches of photographs do not, and sliders agree with decisions."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["demo", "--quiet", f"--output={tmp_path / 'run'}"]) == 0
    calibrate_run(tmp_path / "run", targets=Targets(far=0.01), flag=flag, progress=False)
    with serving(tmp_path / "run") as address:
        tab.show_as()
        tab.open(address)
        tab.wait("!document.querySelector('#desk').hidden")
        shares = []
        for images in (digits(), patches()):
            words = []
            for number, image in zip(range(30), images, strict=False):
                tab.run("document.querySelector('#word').textContent = 'Nothing asked yet'")
                words.append(upload(tab, tmp_path / f"{number}.png", image))
                assert words[-1] == WORDS[search(address, image)["decision"]]
            shares.append(words.count("Match") / 30)
            tab.screenshot(tmp_path / f"{len(shares)}.png")
        assert shares[0] > 0.8
        assert shares[1] < 0.2
        assert tab.complaints == []
