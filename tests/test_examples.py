"""The Python of README and docs runs as it stands: the blocks of a page, in order, as one script in an interpreter of
its own, in an empty folder that holds the reader's photographs and nothing else.

A block that cannot run there says why in its first line, a comment that begins with "Needs": it is compiled, and what
it imports is imported.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = "# Needs "


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def script(page: Path) -> str:
    """What a reader would have who takes the page from top to bottom."""
    return "\n".join(block for block in blocks(page) if not block.startswith(NEEDS))


@pytest.mark.parametrize("page", [page for page in PAGES if script(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_one_script(page: Path, photographs: Path) -> None:
    folder = photographs.parent
    if "learn_ambiguity" in script(page):  # which takes twenty images with a match
        for image in list(photographs.glob("*/*.jpg")):
            for number in range(4):
                shutil.copy(image, image.with_stem(f"{image.stem}-{number}"))
    (folder / "example.py").write_text(script(page))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_that_cannot_run_says_why_and_imports_what_exists(page: Path) -> None:
    for block in blocks(page):
        if block.startswith(NEEDS):
            compile(block, page.name, "exec")
            exec("\n".join(re.findall(r"^(?:from|import) .*$", block, flags=re.MULTILINE)), {})


def test_nearly_all_blocks_run() -> None:
    needing = [(page.name, block.splitlines()[0]) for page in PAGES for block in blocks(page) if NEEDS in block]
    assert needing == [
        ("fit.md", "# Needs a Milvus server at db.example."),
        ("serve.md", "# Needs a finished run, and serves it until it is stopped."),
    ]
    assert sum(len(blocks(page)) for page in PAGES) >= 8
