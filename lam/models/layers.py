"""A network's layers with weights, and derivatives of the network's output with respect to the layers' outputs.

Autograd differentiates all operations between the layers, so any network works. A layer must run once, and map one
tensor to one tensor, each with a row for each item.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from lam.models.head import items, n_items, record_layers, run
from lam.models.modes import evaluating
from lam.utils.blocks import row_blocks
from lam.utils.checks import layers_without

AT_ONCE = 1 << 26
"""Greatest number of tensor elements (256 MiB) for the items in a call of `linearised`; one item may take more."""

_SHARE_OF_GPU = 10
"""On a GPU, the limit is a tenth of its memory: there, D backward passes for more items take no longer."""

_SAME_WITHIN = 1e-4  # relative gap of two derivatives of one weight, above rounding


@dataclass(frozen=True)
class LayerPass:
    """A layer in one pass of N items: its parameters by name, and its inputs.

    `slopes` are the derivatives of the network's D outputs with respect to the layer's output.
    """

    path: str
    module: nn.Module
    weights: dict[str, Tensor]
    inputs: Float[Tensor, "N ..."]
    slopes: Float[Tensor, "N D ..."]


def weighted_layers(network: nn.Module) -> dict[str, nn.Module]:
    """The modules with parameters of their own, by path."""
    return {path: module for path, module in network.named_modules() if own_weights(module)}


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """The detached parameters of a module, without its submodules, by name."""
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}


def find_layers(network: nn.Module, head: str, probe: Any, layers: Literal["all"] | Sequence[str]) -> tuple[str, ...]:
    """Paths of the layers of a posterior, in the order of the network, which runs on a batch of its inputs.

    A path without weights raises a `ValueError`, and so does a layer that a posterior cannot cover, such as one that
    shares weights or runs twice. The error names the layer and the usable layers.
    """
    weighted = weighted_layers(network)
    known = ", ".join(path or "''" for path in weighted)
    if layers != "all" and (isinstance(layers, str) or not layers or not set(layers) <= weighted.keys()):
        raise ValueError(f'layers must be "last", "all" or a list of paths among {known}, got {layers!r}')
    paths = [path for path in weighted if layers == "all" or path in layers]
    problems = _problems(network, head, probe, paths)
    if problems:
        path, problem = next(iter(problems.items()))
        usable = [path for path in paths if path not in problems]
        advice = f": leave it out, with layers={usable}" if usable else ""
        raise ValueError(f"layer {path!r} ({type(weighted[path]).__name__}) {problem}{advice}")
    return tuple(paths)


@torch.inference_mode(False)
def linearised(
    network: nn.Module, head: str, paths: Sequence[str], inputs: Any
) -> tuple[Float[Tensor, "N D"], list[LayerPass]]:
    """Outputs of the head, and each layer with its slopes, from D backward passes in evaluation mode."""
    detached = {name: parameter.detach() for name, parameter in network.named_parameters()}  # no earlier graph
    with evaluating(network), torch.enable_grad(), record_layers(network, {*paths, head}) as calls:
        run(network, _copy_inference_tensors(inputs), detached)
    output, outputs = calls[head][-1][1], [calls[path][-1][1] for path in paths]
    blocked = [path for path, tensor in zip(paths, outputs, strict=True) if not tensor.requires_grad]
    if blocked or not output.requires_grad:
        where = blocked[0] if blocked else head
        raise ValueError(
            f"layer {where!r} runs without gradients, as under torch.no_grad() or torch.inference_mode(): enable them, "
            f"or {layers_without(blocked, paths)}"
        )
    rows = [
        torch.autograd.grad(output, outputs, row.expand_as(output), retain_graph=True, allow_unused=True)
        for row in torch.eye(output.shape[1]).to(output)
    ]
    unused = [path for path, slope in zip(paths, rows[0], strict=True) if slope is None]
    if unused:
        if not unused[0] or head.startswith(f"{unused[0]}."):
            own = ", ".join(own_weights(network.get_submodule(unused[0])))
            raise ValueError(
                f"layer {unused[0]!r} contains {head!r}, and has weights of its own ({own}): put them into a layer "
                f"before it, or {layers_without(unused, paths)}"
            )
        raise ValueError(
            f"the outputs of {head!r} do not depend on layer {unused[0]!r}: {layers_without(unused, paths)}"
        )
    passes = []
    for path, slopes in zip(paths, zip(*rows, strict=True), strict=True):
        module = network.get_submodule(path)
        passes.append(LayerPass(path, module, own_weights(module), calls[path][-1][0][0], torch.stack(slopes, 1)))
    return output.detach(), passes


def head_output(
    network: nn.Module, head: str, inputs: Any, weights: Mapping[str, Tensor] | None = None
) -> Float[Tensor, "N D"]:
    """Output of the head, before any later layers; `weights` replace weights of the network by name."""
    with evaluating(network), record_layers(network, [head]) as calls:
        run(network, inputs, weights)
    return calls[head][-1][1]


def elements_of_pass(
    network: nn.Module, head: str, paths: Sequence[str], inputs: Any, *, jacobians: bool = True
) -> int:
    """Count tensor elements for the derivatives of one item: all slopes, and the largest working memory of a layer.

    A linear layer or convolution at several positions needs its inputs at each position. Any other layer needs its
    input and output for each output of the network. With `jacobians`, both need twice their Jacobian's size as well.
    """
    with evaluating(network), record_layers(network, {*paths, head}) as calls:
        run(network, items(inputs, slice(0, 1)))
    D, slopes, beside = calls[head][-1][1].shape[1], 0, [0]
    for path in paths:
        (entered, *_), output = calls[path][-1]
        module: Any = network.get_submodule(path)
        slopes += D * output.numel()
        if output.ndim > 2 or not isinstance(module, nn.Linear):  # else derivatives are an outer product
            weights = list(own_weights(module).values())
            n, rows = sum(weight.numel() for weight in weights), weights[0].shape[0] if weights[0].ndim else 1
            is_matrix = isinstance(module, (nn.Linear, nn.Conv2d)) and getattr(module, "groups", 1) == 1
            at = output.numel() * n // rows**2 if is_matrix else D * (entered.numel() + output.numel())
            beside.append(at + (2 * D * n if jacobians else 0))
    return slopes + max(beside)


def rows_at_once(
    network: nn.Module, head: str, paths: Sequence[str], inputs: Any, *, jacobians: bool = True
) -> list[slice]:
    """Slices of a batch, each of at most `AT_ONCE` tensor elements; see `elements_of_pass`."""
    if n_items(inputs) == 0:
        return []
    device, at_once = next(network.parameters()).device, AT_ONCE
    if device.type == "cuda":
        at_once = torch.cuda.get_device_properties(device).total_memory // (4 * _SHARE_OF_GPU)
    width = elements_of_pass(network, head, paths, inputs, jacobians=jacobians)
    return list(row_blocks(n_items(inputs), width, elements=at_once))


def _copy_inference_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy_inference_tensors(each) for name, each in value.items()}
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _problems(network: nn.Module, head: str, probe: Any, paths: Sequence[str]) -> dict[str, str]:
    def calls_with(N: int) -> dict[str, Any]:
        with evaluating(network), record_layers(network, paths) as calls:
            run(network, items(probe, [0] * N))
        return calls

    calls, more_calls = calls_with(2), calls_with(3)  # another first axis may have the size 2 by chance
    users: dict[int, list[str]] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(path)
    problems = {}
    for path in paths:
        module = network.get_submodule(path)
        narrow = [weight.dtype for weight in own_weights(module).values() if weight.dtype.itemsize < 4]
        shared = {user for parameter in module.parameters(recurse=False) for user in users[id(parameter)]} - {path}
        if shared:
            problems[path] = f"shares its weights with {', '.join(map(repr, sorted(shared)))}"
        elif narrow:
            problems[path] = f"has weights of {narrow[0]}, but needs float32 (call network.float())"
        elif isinstance(vars(module).get("weight"), Tensor):
            problems[path] = "has a weight that a hook sets (use torch.nn.utils.parametrizations)"
        elif len(calls[path]) != 1:
            times = f"runs {len(calls[path])} times" if calls[path] else "never runs"
            problems[path] = f"{times} in one pass, but must run once"
        elif not (_is_by_item(calls[path][0], 2) and _is_by_item(more_calls[path][0], 3)):
            problems[path] = "does not map one tensor to one, with a row for each item"
        elif _is_changed_by_hook(module, *calls[path][0]):
            problems[path] = "has a forward hook that changes its output (move the change to a later module)"
    reused = () if problems else _layers_with_reused_weights(network, head, items(probe, [0] * 2), paths)
    return problems or dict.fromkeys(
        reused, "has weights that the network also uses elsewhere, or a hook that changes its inputs"
    )


@torch.inference_mode(False)
def _layers_with_reused_weights(network: nn.Module, head: str, inputs: Any, paths: Sequence[str]) -> list[str]:
    """Paths of layers whose weights change the head's output beyond the layer's own call.

    Then autograd's gradient of the weights differs from the gradient through the recorded call.
    """
    parameters = {name: each.detach() for name, each in network.named_parameters() if each.is_floating_point()}
    weights = {name: weight.requires_grad_() for name, weight in parameters.items()}
    try:
        with evaluating(network), torch.enable_grad(), record_layers(network, {*paths, head}) as calls:
            run(network, _copy_inference_tensors(inputs), weights)
    except RuntimeError:  # a part runs in inference mode; `linearised` needs no gradient of weights
        return []
    output, outputs = calls[head][-1][1], [calls[path][-1][1] for path in paths]
    if not all(each.requires_grad for each in (output, *outputs)):  # `linearised` rejects these
        return []
    slopes = torch.autograd.grad(output.sum(), outputs, retain_graph=True, allow_unused=True)
    whole = torch.autograd.grad(output.sum(), list(weights.values()), allow_unused=True)
    by_name, found = dict(zip(weights, whole, strict=True)), list[str]()
    for path, slope in zip(paths, slopes, strict=True):
        module, ((entered,), _) = network.get_submodule(path), calls[path][-1]
        names = {name: f"{path}.{name}" if path else name for name in own_weights(module)}
        exact = [by_name[name] for name in names.values()]
        is_hooked = bool(module._forward_pre_hooks) and isinstance(module, (nn.Linear, nn.Conv2d))
        if is_hooked or slope is None or any(each is None for each in exact):  # a call would hook its inputs twice
            continue
        own = {name: weights[full] for name, full in names.items()}
        with evaluating(network), torch.enable_grad():
            again = functional_call(module, own, (entered,))
        through = torch.autograd.grad(again, list(own.values()), slope)
        gaps = [(one - other).norm() for one, other in zip(exact, through, strict=True)]
        if sum(gaps) > _SAME_WITHIN * sum(each.norm() for each in (slope, *exact)):
            found.append(path)
    return found


@torch.no_grad()
def _is_changed_by_hook(module: nn.Module, entered: tuple[Any, ...], output: Any) -> bool:
    if not (module._forward_hooks and isinstance(module, (nn.Linear, nn.Conv2d))):
        return False
    with evaluating(module):
        own = module.forward(entered[0])
    return own.shape != output.shape or not torch.allclose(own, output, rtol=1e-4, atol=1e-6)


def _is_by_item(call: tuple[tuple[Any, ...], Any], N: int) -> bool:
    tensors = [*call[0], call[1]]
    return len(tensors) == 2 and all(isinstance(part, Tensor) and len(part) == N for part in tensors)
