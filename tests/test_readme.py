import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(0)
    for name, colour in (("birch", 60), ("maple", 130), ("oak", 200)):
        folder = tmp_path / "photographs" / name
        folder.mkdir(parents=True)
        for i in range(6):
            pixels = generator.normal(colour, 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    exec("\n".join(blocks), names)
    assert names["embeddings"].mean.shape[1] == 64
    assert (tmp_path / "encoder" / "MANIFEST.json").is_file()


def test_the_commands_of_the_readme_exist():
    from lam.cli import _parser

    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    shell = "".join(text for language, text in blocks if not language)
    commands = set(re.findall(r"^lam (\w+) ", shell, flags=re.MULTILINE))
    assert commands == {"run", "sweep", "embed", "index", "search", "calibrate", "serve"}
    for command in commands:
        assert command in _parser().format_help()
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert f"\n{target}:" in makefile
