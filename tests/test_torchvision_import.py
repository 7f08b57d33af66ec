"""The import works whatever torchvision was built for, and changes nothing where nothing is wrong."""

import importlib
import importlib.util
import subprocess
import sys
import textwrap

import pytest

from lam import torchvision_import
from lam.torchvision_import import import_torchvision


def run(code: str) -> str:
    """What the code prints in a fresh interpreter, where a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_in_a_fresh_interpreter_and_again():
    output = run("""
        from lam.torchvision_import import import_torchvision
        first, second = import_torchvision(), import_torchvision()
        import torchvision
        assert first is second is torchvision
        print(tuple(torchvision.models.resnet18(num_classes=3).fc.weight.shape))
    """)
    assert output.strip() == "(3, 512)"


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_libraries_that_import_torchvision_work_afterwards_and_after_a_failed_try():
    output = run("""
        try:
            import torchvision
        except RuntimeError:
            pass
        from lam.torchvision_import import import_torchvision
        import_torchvision()
        import warnings
        warnings.simplefilter("default")
        import timm
        print(timm.create_model("resnet18", num_classes=3).num_classes)
    """)
    assert output.strip() == "3"


def test_a_sound_install_is_imported_once_and_nothing_is_declared(monkeypatch):
    calls = []
    monkeypatch.setattr(torchvision_import, "_declare_operators", lambda: pytest.fail("nothing was missing"))
    monkeypatch.setattr(importlib, "import_module", lambda name: calls.append(name) or sys)
    assert import_torchvision() is sys
    assert calls == ["torchvision"]


@pytest.mark.parametrize("error", [RuntimeError("CUDA versions do not match"), ImportError("No module named 'x'")])
def test_any_other_error_is_passed_on(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(torchvision_import, "_declare_operators", lambda: pytest.fail("another error"))
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(type(error), match=str(error)):
        import_torchvision()


def test_importing_the_module_does_not_import_torchvision():
    output = run("""
        import sys
        import lam.torchvision_import
        print("torchvision" in sys.modules)
    """)
    assert output.strip() == "False"
