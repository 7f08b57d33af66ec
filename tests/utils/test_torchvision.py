"""`import lam` makes any build of torchvision importable, and changes nothing for a working one."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from lam.utils import torchvision as torchvision_import

pytestmark = pytest.mark.long


def run(code: str) -> str:
    """The output of code in a new interpreter, in which warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchvision_is_imported_after_lam_and_not_by_it():
    output = run("""
        import sys
        import lam
        assert "torchvision" not in sys.modules
        import torchvision
        print(tuple(torchvision.models.resnet18(num_classes=3).fc.weight.shape))
    """)
    assert output.strip() == "(3, 512)"


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_a_library_that_imports_torchvision_works_after_a_failed_try():
    output = run("""
        try:
            import torchvision
        except RuntimeError:
            pass
        import lam
        import warnings
        warnings.simplefilter("default")
        import timm
        print(timm.create_model("resnet18", num_classes=3).num_classes)
    """)
    assert output.strip() == "3"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_import_after_lam():
    output = run("""
        import lam
        import warnings
        warnings.simplefilter("default")
        from transformers import BertModel
        print(BertModel.__name__)
    """)
    assert output.strip() == "BertModel"


def test_a_sound_install_declares_its_operators_itself(monkeypatch: pytest.MonkeyPatch):
    import torchvision  # noqa: F401 - whose operators are there from now on, by itself or by lam

    (finder,) = (finder for finder in sys.meta_path if type(finder).__module__ == torchvision_import.__name__)
    monkeypatch.setattr(torchvision_import, "_declare_operators", lambda: pytest.fail("nothing was missing"))
    assert finder.find_spec("torchvision._meta_registrations", None) is None


def test_operators_are_declared_when_torchvision_asks_for_them_and_not_before(monkeypatch: pytest.MonkeyPatch):
    """A declaration before torchvision loads its own extension would break a working install."""
    declared = []
    monkeypatch.setattr(torchvision_import, "_declare_operators", lambda: declared.append("nms"))
    monkeypatch.setattr(torch.ops, "torchvision", object(), raising=False)
    finder = torchvision_import.Finder()
    for name in ("torchvision", "torchvision.extension", "torchvision.models", "numpy"):
        assert finder.find_spec(name, None) is None
    assert declared == []
    assert finder.find_spec("torchvision._meta_registrations", None) is None
    assert declared == ["nms"]


@pytest.mark.parametrize("error", ["RuntimeError('CUDA versions do not match')", "ImportError('no such library')"])
def test_any_other_error_is_passed_on(error: str, tmp_path: Path):
    (tmp_path / "torchvision.py").write_text(f"raise {error}")
    output = run(f"""
        import sys
        import lam
        sys.path.insert(0, {str(tmp_path)!r})
        try:
            import torchvision
        except Exception as error:
            print(repr(error))
    """)
    assert output.strip() == error
