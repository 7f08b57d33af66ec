"""The head: the linear layer that gives a network's output, and what enters it.

A posterior over any other layer would be wrong: in a classifier the last linear layer gives class logits, in many
sentence encoders it does not feed the output at all. So the head is not guessed but found on a probe batch. A network
without one can have a layer added after it (`ADDED`), whose weights lie in the posterior alone.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

RELATIVE_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}

ADDED = "(added)"
"""In place of a head's path: a layer after the network, which what the network gives enters."""

_ADD = 'Or let lam.fit add a layer after the network: head="train", or, to keep its embeddings, head="identity"'


def find_head(network: nn.Module, probe: Any, head: str | None = None) -> str:
    """Find the linear layer that gives the direction of the network's output: that is a positive multiple of its own,
    the output itself, normalised, or, as for ArcFace, scaled, by one factor or by one an item.

    Args:
        network: any module; it is run once, in evaluation mode.
        probe: a batch of its inputs.
        head: the path of a layer to hold to the same test; by default every linear layer is tried.

    Returns:
        The layer's path in the network. Where several give the output, the one that ran last.

    Raises:
        ValueError: listing the linear layers with their shapes, where none, or not the named one, gives the output; or
            as `probe_output`.
    """
    linear = {path: module for path, module in network.named_modules() if isinstance(module, nn.Linear)}
    if head is not None and head not in linear:
        raise ValueError(f"head {head!r} is no linear layer of the network, which has {_list(linear)}. {_ADD}")
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, path=path: _record(seen, path, output))
        for path, module in linear.items()
    ]
    try:
        output = probe_output(network, probe)
    finally:
        for handle in handles:
            handle.remove()
    matching = [path for path, candidate in seen.items() if _gives(candidate, output)]
    if head is not None:
        matching = [path for path in matching if path == head]
    if not matching:
        which = "no linear layer gives" if head is None else f"head {head!r} does not give"
        raise ValueError(
            f"{which} the direction of the network's output {tuple(output.shape)}; the network has {_list(linear)}. "
            f"Make the embedding the output of a linear layer, followed at most by a normalisation or a scale. {_ADD}"
        )
    return matching[-1]


def probe_output(network: nn.Module, probe: Any) -> Float[Tensor, "N D"]:
    """Run a network once, in evaluation mode, and refuse what is no batch of embeddings.

    Raises:
        ValueError: where the network does not take the batch by name, or its output is not a matrix (N, D), with how to
            wrap it so that it does; or where the output is empty or not finite.
    """
    named = isinstance(probe, Mapping)
    if named:
        try:
            inspect.signature(network.forward).bind(**probe)
        except TypeError as error:
            raise ValueError(
                f"the network must take a batch of {', '.join(probe)} by name, it does not ({error}): wrap it in a "
                "module whose forward(self, **inputs) returns embeddings (N, D), made with self.network(inputs)"
            ) from None
    with evaluating(network):
        output = run(network, probe)
    if not isinstance(output, Tensor) or output.ndim != 2:
        called = f"self.network({'**' if named else ''}inputs)"
        raise ValueError(
            f"the network must map a batch to embeddings (N, D), it gave {_described(output)}: wrap it in a module "
            f"whose forward returns them, such as {_selected(called, output)}"
        )
    if len(output) == 0:
        raise ValueError("the first batch is empty: the head cannot be found on it")
    if not output.isfinite().all():
        raise ValueError("the network's output on the first batch is not finite")
    return output


def features_and_output(network: nn.Module, head: str, inputs: Any) -> tuple[Float[Tensor, "N P"], Tensor]:
    """Run a batch through the network, in evaluation mode, and give what enters the head beside the network's output.

    Raises:
        ValueError: where what enters the head is not a matrix (N, P).
    """
    with evaluating(network), caught_input(network, head) as caught:
        output = run(network, inputs)
    if not caught or not isinstance(caught[-1], Tensor) or caught[-1].ndim != 2:
        given = "nothing" if not caught else f"shape {tuple(getattr(caught[-1], 'shape', ()))}"
        raise ValueError(f"features must enter head {head!r} as (N, P), got {given}")
    return caught[-1], output


@contextmanager
def caught_input(network: nn.Module, head: str) -> Iterator[list[Any]]:
    """Collect what enters the head while the network runs, given by position or by name."""
    caught: list[Any] = []
    if head == ADDED:
        handle = network.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    else:
        handle = network.get_submodule(head).register_forward_pre_hook(
            lambda _module, args, kwargs: caught.append(args[0] if args else kwargs["input"]), with_kwargs=True
        )
    try:
        yield caught
    finally:
        handle.remove()


def run(network: nn.Module, inputs: Any) -> Any:
    """Call the network on a batch, on the network's own device; a batch of named inputs is given by name.

    Raises:
        ValueError: for a network without weights, a batch that is neither tensor nor dictionary, or inputs of a type
            that the network does not take and its weights do not have.
    """
    parameter = next(network.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "meta":
        raise ValueError(
            "the network is on the meta device, where it has shapes and no weights: make it on a device that has "
            'memory, or call network.to_empty(device="cpu") and load its weights'
        )
    if isinstance(inputs, Tensor):
        try:
            return network(inputs.to(device))
        except RuntimeError as error:
            if parameter is None or inputs.dtype == parameter.dtype:
                raise
            scaled = "" if inputs.is_floating_point() else ", scaled and normalised as in training"
            raise ValueError(
                f"the network does not take inputs of {inputs.dtype} ({str(error).splitlines()[0]}): its weights are "
                f"{parameter.dtype}, so convert them, inputs.to({parameter.dtype}){scaled}"
            ) from error
    if isinstance(inputs, Mapping):
        return network(
            **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        )
    raise ValueError(f"a batch of inputs must be a tensor or a dictionary of named inputs, got {type(inputs).__name__}")


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode without gradients, and every module back into its own mode afterwards."""
    training = [module for module in network.modules() if module.training]
    if training:
        network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _record(seen: dict[str, Tensor], path: str, output: Any) -> None:
    seen.pop(path, None)
    if isinstance(output, Tensor):
        seen[path] = output


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"shape {tuple(output.shape)}"
    return type(output).__name__ + (f" of {', '.join(output)}" if isinstance(output, Mapping) else "")


def _selected(called: str, output: Any) -> str:
    """Write how the last matrix among several outputs is selected."""
    parts = output.items() if isinstance(output, Mapping) else enumerate(output) if isinstance(output, tuple) else ()
    found = [key for key, part in parts if isinstance(part, Tensor) and part.ndim == 2 and part.is_floating_point()]
    if not found:
        return f"pool({called})"
    return f'{called}["{found[-1]}"]' if isinstance(found[-1], str) else f"{called}[{found[-1]}]"


def _gives(candidate: Tensor, output: Tensor) -> bool:
    """Whether every row of the output is a positive multiple of the candidate's."""
    if candidate.shape != output.shape:
        return False
    gap = F.normalize(candidate.double(), dim=1) - F.normalize(output.double(), dim=1)
    return bool((gap.norm(dim=1) <= RELATIVE_TOLERANCE.get(output.dtype, 1e-4)).all())


def _list(linear: dict[str, nn.Linear]) -> str:
    if not linear:
        return "no linear layer"
    return "these linear layers: " + ", ".join(
        f"{path or 'the network itself'} ({module.in_features} -> {module.out_features})"
        for path, module in linear.items()
    )
