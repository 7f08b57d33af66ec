"""Imports torchvision, also beside a torch that it was not built for.

torchvision's wheels on PyPI are built for CUDA. Beside a CPU-only torch its extension does not load, its operators are
never declared, and `import torchvision` dies where it registers shapes for one of them: "operator torchvision::nms does
not exist". Networks, transforms and data sets need none of these operators, so declaring the schemas is all it takes.
They are declared only after that very error: a sound install declares them itself, and a second declaration would break
it. What remains missing is the operators' code: `torchvision.ops.nms` and its kin say so when they are called.

lam calls this where torchvision is first needed, never on `import lam`. Libraries that import torchvision themselves
(timm, transformers) work once it has been called. No use of torchvision lives here.
"""

import importlib
import sys
from types import ModuleType

import torch

_MISSING_OPERATOR = "operator torchvision::nms does not exist"
_declared: list[torch.library.Library] = []  # a schema lives as long as its Library


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the operators that a build for another torch leaves undeclared.

    Returns:
        The module `torchvision`; `import torchvision` works from then on, too.

    Raises:
        ImportError, RuntimeError: What `import torchvision` raises for any other reason.

    Example:
        >>> import_torchvision().__name__
        'torchvision'
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING_OPERATOR not in str(error):
            raise
    _declare_operators()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
