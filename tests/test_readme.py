import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_commands_of_the_readme_exist():
    from lam.cli import _parser

    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    shell = "".join(text for language, text in blocks if not language)
    commands = set(re.findall(r"^lam (\w+) ", shell, flags=re.MULTILINE))
    assert commands == {"run", "sweep", "compare", "embed", "index", "search", "calibrate", "serve"}
    for command in commands:
        assert command in _parser().format_help()
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert f"\n{target}:" in makefile
