"""Kernels that a GPU would launch: operations and synchronisations of κ and of an online step, from a trace on the CPU.

    python benchmarks/kernels.py

A small kernel takes a GPU about as long as its launch, so their number is the cost of κ for a small batch. Views do not
count. A synchronisation copies a value to Python. "Compiled" is the posterior's program as `encoder.export` traces it,
after fusion by inductor: its loops and its matrix products. results/kernels.json holds the counts; `embed.py` and
`online.py` measure seconds, on a GPU if there is one.
"""

import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch._inductor.metrics as inductor
from online import stepper
from timing import write
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lam
from lam import models
from lam.methods import LaplaceOnline
from lam.methods.laplace_online import OnlineLaplaceStep
from lam.pairs.pairs import Pairs
from lam.training.steps import Minibatch, Step

CASES = (("resnet50", 512, (3, 64, 64), 16), ("convnet28", 3, (1, 28, 28), 256))
VIEWS = (
    *("alias", "as_strided", "detach", "diagonal", "empty", "expand", "lift_fresh", "narrow", "permute", "reshape"),
    *("select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsafe_view", "unsqueeze", "view"),
)
PRODUCTS = {"mm", "addmm", "bmm", "matmul"}
TO_PYTHON = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}


class Counting(TorchDispatchMode):
    """Counts operations by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, int]:
        """Number of operations, without views and copies to Python, and number of these copies."""
        copies = sum(n for name, n in self.calls.items() if name in TO_PYTHON)
        views = sum(n for name, n in self.calls.items() if name.strip("_") in VIEWS)
        return {"operations": self.calls.total() - views - copies, "synchronisations": copies}


def counted(call: Any) -> dict[str, int]:
    """The counts of a call that has run before."""
    call()
    with Counting() as counting:
        call()
    return counting.counts()


class Head(nn.Module):
    """κ from features and the network's output."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, features: Tensor, output: Tensor) -> tuple[Tensor, ...]:
        embeddings = self._compute(features, output)
        return embeddings.mean, embeddings.kappa, embeddings.variance


def compiled(posterior: Any, features: Tensor) -> dict[str, Any]:
    """Launches of the compiled program, and the relative difference of its κ from the eager κ."""
    head = Head(posterior.predictor(checked=False))
    inputs = features, posterior.outputs(features)
    batch = torch.export.Dim("batch", min=2, max=1 << 16)
    program = torch.export.export(head, inputs, dynamic_shapes=({0: batch}, {0: batch}))
    products = sum(
        getattr(node.target, "overloadpacket", node.target).__name__ in PRODUCTS
        for node in program.run_decompositions().graph.nodes
        if node.op == "call_function"
    )
    torch._dynamo.reset()
    inductor.reset()
    module = torch.compile(program.module(), dynamic=True)
    _, kappa, _ = module(*inputs)
    _, eager, _ = head(*inputs)
    return {
        "loops": inductor.generated_kernel_count,
        "products": products,
        "greatest_difference_of_kappa": float(((kappa - eager) / eager).abs().max()),
    }


def measure(name: str, dimension: int, shape: tuple[int, ...], batch: int) -> dict[str, Any]:
    """Counts for embedding a batch, and for steps of training."""
    generator = torch.Generator().manual_seed(0)
    network = models.build(name, dimension=dimension).eval()
    inputs = torch.rand(batch, *shape, generator=generator)
    labels = torch.arange(batch) % (batch // 4)
    encoder = lam.fit(network, [(inputs, labels)], margin=0.7, progress=False)
    with torch.no_grad():
        found: dict[str, Any] = {"network": name, "D": dimension, "batch": batch}
        found["forward"] = counted(lambda: network(inputs))
        found["embed"] = counted(lambda: encoder.embed(inputs))
        found["compiled κ"] = compiled(encoder.posterior, encoder.features(inputs))
    minibatch = Minibatch(inputs, Pairs.by_label(labels), 0, generator)
    for kind, step in (("step", Step()), ("online step", OnlineLaplaceStep("head", LaplaceOnline(n_samples=1)))):
        found[kind] = counted(stepper(network.train(), step, minibatch, "32-true"))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    write("kernels", {"cases": [measure(*case) for case in CASES]})


if __name__ == "__main__":
    sys.exit(main())
