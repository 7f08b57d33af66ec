"""Errors of an index and an encoder for wrong dimensions and types, as JSON: python -O -m tests.encoders.wrong_shapes.

With -O, no `assert` runs, and outside of pytest, nothing checks annotated shapes. So lam itself raises these errors.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from lam.methods.fit import fit_features
from lam.retrieval import Index
from lam.vmf.embeddings import Embeddings

D, P = 8, 5
TYPES = (torch.int64, torch.bool, torch.complex64)


def wrong(width: int) -> dict[str, Tensor]:
    """Tensors that are not floating-point unit vectors of shape (3, width)."""
    shapes = {
        "one too few": (3, width - 1),
        "one too many": (3, width + 1),
        "none": (3, 0),
        "twice as many": (3, 2 * width),
        "a vector": (width,),
        "a vector of three": (3,),
        "three axes": (1, 3, width),
        "three axes, the last of one": (3, width, 1),
        "a number": (),
    }
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for values in found.values():
        if values.ndim and values.numel():
            values[..., :1] = 1.0
    return found | {str(kind): torch.eye(3, width, dtype=kind) for kind in TYPES}


def told(call: Callable[[], object]) -> str:
    """The type and message of an error, or the result of a call without an error."""
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> dict[str, str]:
    rows = Embeddings(torch.eye(3, D), *torch.ones(3, 3))
    held = Index(D)
    held.add(rows, [7, 8, 9])
    found = {}
    for name, mean in wrong(D).items():
        found[f"add, {name}"] = told(lambda mean=mean: held.add(Embeddings(mean, *torch.ones(3, 3)), [1, 2, 3]))
        found[f"search, {name}"] = told(lambda mean=mean: held.search(Embeddings(mean, *torch.ones(3, 3)), 1))
    encoder = fit_features(torch.randn(30, P), torch.arange(30) % 3, torch.randn(D, P), margin=0.5)
    for name, features in wrong(P).items():
        found[f"embed, {name}"] = told(lambda features=features: encoder.embed(features))
    return found | {"held": str(held.ids.tolist())}


if __name__ == "__main__":
    json.dump({"optimised": not __debug__, "told": main()}, sys.stdout)
