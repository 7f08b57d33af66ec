"""The examples run and draw, the tutorials show them, and the Python of README and docs runs as it stands.

The blocks of a page run in order, as one script, in an empty folder that holds the reader's photographs. A block that
cannot run there says why in its first line, a comment that begins with "Needs": its imports are executed.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = "# Needs "


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def script(page: Path) -> str:
    """All code of a page, in order."""
    return "\n".join(block for block in blocks(page) if not block.startswith(NEEDS))


def runs(program: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs_and_draws_a_picture(example: Path, tmp_path: Path) -> None:
    runs(example, tmp_path)
    with Image.open(tmp_path / f"{example.stem}.png") as picture:
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20


def test_there_are_four_short_examples() -> None:
    assert len(EXAMPLES) == 4
    assert all(len(example.read_text(encoding="utf-8").splitlines()) < 80 for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_code_of_a_tutorial_stands_in_its_example(example: Path) -> None:
    shown = blocks(TUTORIALS / f"{example.stem}.md")
    assert len(shown) >= 3
    for block in shown:
        assert block in example.read_text(encoding="utf-8"), block


@pytest.mark.parametrize(
    "page", [page for page in PAGES if script(page) and page.parent != TUTORIALS], ids=lambda page: page.stem
)
def test_the_blocks_of_a_page_run_as_one_script(page: Path, photographs: Path) -> None:
    folder = photographs.parent
    if "learn_ambiguity" in script(page):  # learning ambiguity takes twenty images with a match
        for image in list(photographs.glob("*/*.jpg")):
            for number in range(4):
                shutil.copy(image, image.with_stem(f"{image.stem}-{number}"))
    (folder / "example.py").write_text(script(page))
    runs(folder / "example.py", folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_that_cannot_run_says_why_and_imports_what_exists(page: Path) -> None:
    for block in blocks(page):
        if block.startswith(NEEDS):
            compile(block, page.name, "exec")
            exec("\n".join(re.findall(r"^(?:from|import) .*$", block, flags=re.MULTILINE)), {})


def test_nearly_all_blocks_run() -> None:
    needing = [(page.name, block.splitlines()[0]) for page in PAGES for block in blocks(page) if NEEDS in block]
    assert needing == [
        ("gallery.md", "# Needs a Milvus server at db.example."),
        ("operate.md", "# Needs a service."),
        ("serve.md", "# Needs a service."),
        ("http.md", "# Needs a finished run, and serves it until it is stopped."),
    ]
    assert sum(len(blocks(page)) for page in PAGES) >= 8
