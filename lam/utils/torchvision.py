"""Makes torchvision importable beside a torch that it was not built for, for anyone after `import lam`.

torchvision's wheels on PyPI are built for CUDA. Beside a CPU-only torch its extension does not load, its operators are
never declared, and `import torchvision` fails where it registers shapes for one of them: "operator torchvision::nms
does not exist". Networks, transforms and data sets need none of these operators, so declaring the schemas is enough. It
happens just before that place, and only if the extension has not done so: a second declaration would break a sound
install. `torchvision.ops.nms` and its kin then have no code, and say so when they are called.

`import lam` does not import torchvision, but watches for its import, for libraries such as timm and transformers.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch

_REGISTRATIONS = "torchvision._meta_registrations"  # which torchvision imports right after its extension
_declared: list[torch.library.Library] = []  # a schema lives as long as its Library


class Finder(MetaPathFinder):
    """Finds no module, but declares missing operators of torchvision just before it needs them."""

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
