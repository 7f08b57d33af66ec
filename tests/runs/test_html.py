"""The report: complete in one file, escaped, and with every given number."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lam.runs.report import Plot, write_report

METRICS = {
    "recall@1": 0.8123,
    "map@10": 0.7512,
    "ece": None,
    "ausc": math.nan,
    "n_queries": 10_000,
    "clipped_share": 0.25,
    "auroc": 0.971,
    "auprc": 0.968,
    "prevalence": 0.5,
    "auroc_knn": 0.9973,
    "auprc_knn": 0.9961,
    "auroc@digits_held_out": 0.91,
    "auprc_my_score@digits_held_out": 0.42,
    "seconds_train": 75.0,
    "seconds_tune": 7200.0,
    "seconds_fit": 4.125,
}


class Outline(HTMLParser):
    """Rows of cells, tags and addresses, with every tag checked to be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "link"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data

    def close(self) -> None:
        super().close()
        assert not self._open


def report(folder: Path, **given: Any) -> tuple[str, Outline, dict[str, list[str]]]:
    """A report from given parts: its text, its outline, and the cells of each row by its first cell."""
    path, parsed = folder / "report.html", Outline()
    write_report(path, **{"title": "A run", **given})
    text = path.read_text(encoding="utf-8")
    parsed.feed(text)
    parsed.close()
    return text, parsed, {row[0]: row[1:] for row in parsed.rows}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.new("RGB", (40, 30), "red").save(path)
    return path


def test_a_whole_report(tmp_path: Path, picture: Path) -> None:
    configuration = {"data": {"name": "digits", "sizes": [1, 2]}, "seed": 0, "empty": {}}
    plots = [Plot("ROC", "How many are flagged.", picture)]
    given = {"metrics": METRICS, "plots": plots, "configuration": configuration, "notes": ["A note."]}
    text, _, rows = report(tmp_path, **given)
    assert rows["recall@1"][:2] == ["0.8123", "↑ higher is better"]
    assert rows["mAP@10"][0] == "0.7512"
    assert rows["ECE"][:2] == ["–", "↓ lower is better"]
    assert rows["AUSC"][0] == "–"
    assert rows["queries"][0] == "10,000"
    assert rows["clipped share"][:2] == ["0.2500", ""]
    assert rows[""] == ["main OOD set (prevalence 0.500)", "digits held out"]
    assert rows["score"] == ["AUROC ↑", "AUPRC ↑"] * 2
    assert rows["−κ (spread on the sphere)"] == ["0.9710", "0.9680", "0.9100", "–"]
    assert rows["cosine to near training features"] == ["0.9973", "0.9961", "–", "–"]
    assert rows["my score"] == ["–", "–", "–", "0.4200"]
    assert (rows["train"][0], rows["tune"][0], rows["fit"][0]) == ("1.2 min", "2 h 00 min", "4.1 s")
    for name, value in (("data.name", "digits"), ("data.sizes", "[1, 2]"), ("seed", "0"), ("empty", "{}")):
        assert rows[name] == [value]
    assert "A note." in text
    assert re.search(r'class="number best">0\.9973<', text)
    assert not re.search(r'class="number best">0\.9710<', text)


def test_the_first_ood_set_is_named_like_the_others(tmp_path: Path) -> None:
    _, _, rows = report(tmp_path, metrics=METRICS, ood_set="digits_patches")
    assert rows[""] == ["digits patches (prevalence 0.500)", "digits held out"]


def test_tuning_and_corruption_have_tables_of_their_own(tmp_path: Path) -> None:
    metrics: dict[str, float | int | None] = {"tuned_scale": 1778279.41, "tuned_score": 0.1646}
    metrics |= {f"corruption_{name}_recall@1": 0.9 for name in ("clean", "noise_1", "noise_2", "blur_1", "blur_2")}
    metrics |= {f"corruption_{name}_kappa": 3e5 for name in ("clean", "noise_1", "noise_2", "blur_1", "blur_2")}
    metrics |= {"corruption_noise_trend": 0.93, "corruption_blur_trend": None}
    text, _, rows = report(tmp_path, metrics=metrics)
    assert rows["likelihood scale s"][0] == "1.78e6"
    assert rows["kind"] == ["clean", "1", "2", "clean", "1", "2", "trend of κ"]
    assert rows["noise"] == ["0.900"] * 3 + ["3.00e5"] * 3 + ["0.93"]
    assert rows["blur"][-1] == "–"
    assert "−1 if κ falls with every step" in text
    bare = {name: value for name, value in metrics.items() if name.endswith("recall@1")}
    _, _, rows = report(tmp_path, metrics=bare)
    assert rows["noise"] == ["0.900"] * 3


def test_parts_of_kappa_and_classes_never_trained_on_have_columns_and_a_table(tmp_path: Path) -> None:
    metrics: dict[str, float | int | None] = {f"corruption_{name}_recall@1": 0.9 for name in ("clean", "blur_1")}
    metrics |= {"corruption_blur_trend": -0.5, "corruption_blur_trend_kappa_aleatoric": -0.75}
    metrics |= {"r_auroc": 0.8, "r_auroc_margin": 0.7, "r_auroc@unseen": 0.61, "r_auroc_margin@unseen": 0.62}
    metrics |= {"mann_whitney_p": 0.03, "mann_whitney_p_margin": 2e-9, "unseen_recall@1": 0.55}
    text, parsed, _ = report(tmp_path, metrics=metrics)
    rows = [[cell.replace("−", "-") for cell in row] for row in parsed.rows]
    assert ["blur", "0.900", "0.900", "-0.50", "-0.75"] in rows
    for cells in (["0.7000", "< 0.0001"], ["0.6200"]):
        assert ["margin of the first hit over another class", *cells] in rows
    assert "Classes never trained on" in text
    assert not re.search(r'class="number best">&lt; 0', text)


def test_it_needs_no_script_and_no_other_host(tmp_path: Path, picture: Path) -> None:
    text, parsed, _ = report(tmp_path, metrics=METRICS, plots=[Plot("ROC", "", picture)])
    picture.unlink()
    assert "script" not in parsed.tags
    assert "link" not in parsed.tags
    assert len(parsed.addresses) == 1
    assert parsed.addresses[0].startswith("data:image/png;base64,")
    assert not re.search(r"https?:|@import|url\(", text)
    assert "default-src 'none'" in text


def test_everything_is_escaped(tmp_path: Path, picture: Path) -> None:
    evil = '"><script>alert(1)</script>&'
    text, parsed, _ = report(
        tmp_path,
        title=evil,
        metrics={evil: 1.0, f"auroc_{evil}": 0.5, f"auroc@{evil}": 0.5, f"seconds_{evil}": 1.0},
        plots=[Plot(evil, evil, picture)],
        configuration={evil: {evil: evil}},
        notes=[evil],
    )
    assert "script" not in parsed.tags
    assert text.count("alert(1)") >= 9


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    _, parsed, _ = report(tmp_path, title="Nothing yet", metrics={})
    assert "h1" in parsed.tags
    assert not {"section", "table", "figure"} & set(parsed.tags)
