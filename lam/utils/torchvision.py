"""Lets torchvision be imported beside a torch that it was not built for, by lam or by anyone after `import lam`.

torchvision's wheels on PyPI are built for CUDA. Beside a CPU-only torch its extension does not load, its operators are
never declared, and `import torchvision` dies where it registers shapes for one of them: "operator torchvision::nms does
not exist". Networks, transforms and data sets need none of these operators, so declaring the schemas is all it takes.
They are declared just before that place, and only where the extension has not: a sound install declares them itself,
and a second declaration would break it. What remains missing is the operators' code: `torchvision.ops.nms` and its kin
say so when they are called.

`import lam` imports no torchvision, it only watches for its import, for libraries that import it themselves (timm,
transformers). No use of torchvision lives here.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch

_REGISTRATIONS = "torchvision._meta_registrations"  # which torchvision imports right after its extension
_declared: list[torch.library.Library] = []  # a schema lives as long as its Library


class Finder(MetaPathFinder):
    """Finds no module, but declares torchvision's operators where they are missing when they are asked for."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Leave every module to the other finders."""
        if fullname == _REGISTRATIONS and not hasattr(torch.ops.torchvision, "nms"):
            _declare_operators()


def install() -> None:
    """Watch for the import of torchvision."""
    sys.meta_path.insert(0, Finder())


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
