"""Makes torchvision importable beside a CPU-only torch, once lam is imported.

torchvision's wheels on PyPI are built for CUDA. Beside a CPU-only torch, its extension does not load, so no operator is
declared. `import torchvision` then fails as it registers shapes of operators: "operator torchvision::nms does not
exist". Networks, transforms and data sets do not call operators, so a declaration is enough. lam declares the operators
just before this registration. If the extension has loaded, lam declares nothing, because a second declaration would
break a sound install. Declared operators, such as `torchvision.ops.nms`, raise an error when they are called.

`import lam` does not import torchvision; it watches for this import, also by libraries such as timm and transformers.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch

_REGISTRATIONS = "torchvision._meta_registrations"  # torchvision imports it right after its extension
_libraries: list[torch.library.Library] = []  # a schema lives as long as its Library


class Finder(MetaPathFinder):
    """Declares missing operators of torchvision during its import; finds no module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Declare missing operators before torchvision registers their shapes; other finders find the module."""
        if fullname == _REGISTRATIONS and not hasattr(torch.ops.torchvision, "nms"):
            _declare_operators()


def install() -> None:
    """Watch for the import of torchvision."""
    sys.meta_path.insert(0, Finder())


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
