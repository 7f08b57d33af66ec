"""The head, the linear layer that computes a network's output; and features, the head's inputs.

The last linear layer is not always the head: many sentence encoders do not compute their output with this layer. So a
probe batch shows which layer is the head. A network without a head gets a layer after its output (`ADDED`); the
posterior stores the weights of this layer.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lam.models.modes import evaluating, network_lock, uncompiled
from lam.models.weights import unwrapped
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_finite

RELATIVE_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}

ADDED = "(added)"  # path of a head that is added after the network; its input is the network's output
_CHANGED = 1e-3  # relative change of a weight beyond rounding
_ALONE = "give inputs[None] for one item alone"
_ADD = 'Or let lam.fit add a layer after the network: head="train", or, to keep its embeddings, head="identity"'


def default_head(network: nn.Module, head: str | None) -> str | None:
    """The setting `head`; None becomes `identity` for a TorchScript network, because its layers cannot be reached."""
    return "identity" if head is None and isinstance(network, torch.jit.ScriptModule) else head


def find_head(network: nn.Module, probe: Any, head: str | None = None) -> str:
    """Path of the linear layer that determines the direction of the network's output.

    The network's output is a positive multiple of the layer's output: equal, normalised, or scaled as for ArcFace. The
    network runs twice on a batch of its inputs, in evaluation mode. If several layers match, the last one counts; with
    `head`, only this path is tried.

    Raises:
        ValueError: if no linear layer matches, or `head` does not match; if the layer computes more than weight times
            input plus bias; or for the reasons in `probe_output`.
    """
    linear = {path: module for path, module in network.named_modules() if isinstance(module, nn.Linear)}
    if head is not None and head not in linear:
        raise ValueError(f"head {head!r} is not a linear layer of the network; it has {_list(linear)}. {_ADD}")
    with record_layers(network, linear) as recording:
        output = _embeddings_of(network, probe)
        calls = dict(recording)
        _check_by_item(network, probe, output)
    matching = [path for path, passes in calls.items() if passes and _same_direction(passes[-1][1], output)]
    if head is not None:
        matching = [path for path in matching if path == head]
    if not matching:
        which = "no linear layer gives" if head is None else f"head {head!r} does not give"
        raise ValueError(
            f"{which} the direction of the network's output {tuple(output.shape)}; the network has {_list(linear)}. "
            f"End the network in a linear layer, with at most a normalisation or a scale after it. {_ADD}"
        )
    with evaluating(network):  # in training mode, reading a spectral norm's weight changes it
        for path in reversed(matching):  # the last one is nearest to the output; an earlier one may only feed it
            layer, (inputs, _) = linear[path], calls[path][-1]
            with without_autocast():  # a head may have run without autocast
                linear_output = F.linear(inputs[0].to(layer.weight.dtype), layer.weight, layer.bias)
            if _same_direction(linear_output.to(output.dtype), output):
                return path
    raise ValueError(
        f"head {matching[-1]!r} ({type(linear[matching[-1]]).__name__}) gives the network's output, but not as weight "
        f"times input plus bias: move its other operations to another layer or a parametrization. {_ADD}"
    )


def probe_output(network: nn.Module, probe: Any) -> Float[Tensor, "N D"]:
    """Output of a network on one batch, in evaluation mode.

    Raises:
        ValueError: if the network does not take the batch; if its output is not a finite matrix (N, D); or if an item's
            output is random or depends on other items, as with a batch norm that uses the batch's statistics.
    """
    output = _embeddings_of(network, probe)
    _check_by_item(network, probe, output)
    return output


def features_and_output(network: nn.Module, head: str, inputs: Any) -> tuple[Float[Tensor, "N P"], Tensor]:
    """Inputs of the head (N, P) and the network's output for a batch, in evaluation mode."""
    with evaluating(network):
        features, output = _input_and_output(network, head, lambda: run(network, inputs))
    if not isinstance(features, Tensor) or features.ndim != 2:
        actual = "nothing" if features is None else f"shape {tuple(getattr(features, 'shape', ()))}"
        actual += f": {_ALONE}" if getattr(features, "ndim", 0) == 1 else ""
        raise ValueError(f"features must enter head {head!r} as (N, P), got {actual}")
    return features, output


def head_input_and_output(network: nn.Module, head: str, inputs: Any) -> tuple[Any, Any]:
    """Inputs of the head and the network's output for a batch, in the network's current mode, with gradients."""
    inner = unwrapped(network, compiled=False)  # Fabric's wrapper hides a part that is named "module"
    return _input_and_output(inner, head, lambda: network(inputs))


def _input_and_output(network: nn.Module, head: str, call: Callable[[], Any]) -> tuple[Any, Any]:
    """The head's input in `call`, a pass of the network, and the output; the input is None if the head did not run."""
    if head == ADDED:
        output = call()
        return output, output
    with record_head_inputs(network, head) as head_inputs:
        output = call()
    return head_inputs[-1] if head_inputs else None, output


def check_weights(
    network: nn.Module, head: str, weight: Float[Tensor, "D P"], bias: Float[Tensor, " D"] | None
) -> None:
    """Require that the head still has this weight and bias, up to rounding to the head's type."""
    layer: Any = network.get_submodule(head)
    with evaluating(layer):
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):  # after a load, `weight` is old until the hook runs
                hook(layer, None)
        own = [part for part in (layer.weight, layer.bias) if part is not None]
    fitted = [part for part in (weight, bias) if part is not None]
    if [part.shape for part in own] == [part.shape for part in fitted]:
        gaps = [(one.to(part) - part.to(one.dtype).to(part)).norm() for one, part in zip(own, fitted, strict=True)]
        if torch.stack(gaps).norm() <= _CHANGED * torch.stack([part.norm() for part in fitted]).norm():
            return
    raise ValueError(
        f"the weight or bias of {head!r} has changed since the posterior was fitted, so κ would be wrong: fit again, "
        "or give lam.fit a copy of the network (copy.deepcopy) and train the other"
    )


@contextmanager
def record_head_inputs(network: nn.Module, head: str) -> Iterator[list[Any]]:
    """A list that collects copies of the head's inputs, positional or named, while the network runs."""
    head_inputs: list[Any] = []
    own = threading.get_ident()

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _runs_in(own):
            entered = args[0] if args else kwargs["input"]  # later layers may change it in place
            head_inputs.append(entered.clone() if isinstance(entered, Tensor) else entered)

    layer = network.get_submodule(head)
    with network_lock, uncompiled(network, [layer]), layer.register_forward_pre_hook(record, with_kwargs=True):
        yield head_inputs


@contextmanager
def record_layers(network: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[tuple[tuple[Any, ...], Any]]]]:
    """Inputs and outputs of layers by path, in the order of the calls, recorded while the network runs.

    With gradients enabled, a float output that requires no gradient is made to require one. Later layers get a copy
    of the output, so they cannot change the record in place.
    """
    calls: dict[str, list[tuple[tuple[Any, ...], Any]]] = {path: [] for path in paths}
    own = threading.get_ident()

    def record(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not _runs_in(own):
            return output
        entered = (*args, *kwargs.values())
        entered = tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in entered)
        if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
            output = output.detach().requires_grad_(output.is_floating_point())
        calls[path] = [*calls.pop(path), (entered, output)]
        return output.clone() if isinstance(output, Tensor) else output

    layers = {path: network.get_submodule(path) for path in calls}
    with network_lock, uncompiled(network, layers.values()), ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, path), with_kwargs=True))
        yield calls


def run(network: nn.Module, inputs: Any, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Output of a network on a batch, on the network's device; `weights` replace weights of the network by name.

    Named inputs are passed by name. A single input is passed by position if the network does not take its name.

    Raises:
        ValueError: for weights or inputs on the meta device, a batch that is neither tensor nor dictionary, or names,
            shapes or types that the network does not take.
    """
    parameter = next(network.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if any(each.is_meta for each in network.parameters()):
        raise ValueError(
            "the network, or a part of it, is on the meta device and has no weights: build it on another device, or "
            'call network.to_empty(device="cpu") and load its weights'
        )
    if isinstance(inputs, Mapping):
        args, kwargs = _arguments(network, inputs)
    elif isinstance(inputs, Tensor):
        args, kwargs = [inputs], {}
    else:
        advice = ": give preprocessing(image)[None]" if hasattr(inputs, "__array_interface__") else ""
        if isinstance(inputs, str) or (isinstance(inputs, list | tuple) and isinstance(next(iter(inputs), None), str)):
            advice = ": give torch.stack([encoder.preprocessing(text) for text in texts]), or your tokenizer's tensors"
        raise ValueError(
            f"a batch of inputs must be a tensor or a dictionary of named inputs, got {type(inputs).__name__}{advice}"
        )
    if any(isinstance(each, Tensor) and each.is_meta for each in (*args, *kwargs.values())):
        raise ValueError("the inputs are on the meta device and have no values: give tensors on another device")
    call = (
        partial(functional_call, network, dict(weights)) if weights else lambda args, kwargs: network(*args, **kwargs)
    )
    try:
        return call(tuple(_on(device, each) for each in args), {name: _on(device, kwargs[name]) for name in kwargs})
    except (RuntimeError, ValueError, IndexError) as error:  # a batch norm raises ValueError
        if len(args) == 1 and isinstance(args[0], Tensor) and (reason := refusal(args[0], parameter, str(error))):
            raise ValueError(reason) from error
        raise
    except (TypeError, AttributeError) as error:
        of_mapping = (f"'Tensor' object has no attribute '{name}'" for name in ("get", "items", "keys", "pop"))
        lacks = ("required positional argument", *of_mapping)
        if not (isinstance(inputs, Tensor) and any(words in str(error) for words in lacks)):
            raise
        raise ValueError(
            f"the network does not take a single tensor ({error}): give a batch as a dictionary of its inputs by name, "
            'with the targets under the key "labels"'
        ) from error


def _arguments(network: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    try:
        inspect.signature(network.forward).bind(**inputs)
    except TypeError as error:
        if len(inputs) == 1:
            return list(inputs.values()), {}
        raise ValueError(
            f"the network must take a batch of {', '.join(inputs)} by name, got an error ({error}): wrap it in a "
            "module with a forward(self, **inputs) that returns embeddings (N, D), such as self.network(inputs); "
            'labels go under the key "labels" or "label"'
        ) from None
    return [], dict(inputs)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def refusal(inputs: Tensor, parameter: Tensor | None, error: str) -> str | None:
    """The error for inputs of a wrong type or shape; None if type and shape are not the reason."""
    reason = error.splitlines()[0]
    if parameter is not None and inputs.dtype != parameter.dtype:
        scaled = "" if inputs.is_floating_point() else ", scaled and normalised as in training"
        return (
            f"the network does not take inputs of {inputs.dtype} ({reason}): its weights are {parameter.dtype}, so "
            f"convert them, inputs.to({parameter.dtype}){scaled}"
        )
    if not any(words in error for words in ("channels", "mat1 and mat2", "shape", "D input", "batched", "Dimension")):
        return None
    refused = f"the network does not take inputs of shape {tuple(inputs.shape)} ({reason}): "
    if inputs.ndim in (3, 4):
        return (
            f"{refused}images are (N, C, H, W); give inputs[None] for a single image, inputs.permute(0, 3, 1, 2) for "
            "(N, H, W, C)"
        )
    alone = f"; {_ALONE}" if inputs.ndim == 1 else ""
    return f"{refused}give them as in training, one row for each item{alone}"


def items(inputs: Any, rows: slice | list[int]) -> Any:
    """Rows of a batch; in a batch of named inputs, tensors without a row for each item stay whole."""
    if isinstance(inputs, Mapping):
        n = n_items(inputs)
        has_rows = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.shape[:1] == (n,)}
        return {name: value[rows] if name in has_rows else value for name, value in inputs.items()}
    return inputs[rows]


def n_items(inputs: Any) -> int:
    """Number of items in a batch: rows of the tensor, or of the longest tensor in a dictionary; 1 without any rows."""
    parts = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return max((len(part) for part in parts if isinstance(part, Tensor) and part.ndim), default=1)


def _runs_in(thread: int) -> bool:
    """Whether the current thread is `thread`; hooks ignore other threads that call the network.

    Also True while torch compiles: compiled code cannot check threads, and `network_lock` guards the compilation.
    """
    return torch.compiler.is_compiling() or threading.get_ident() == thread


def _embeddings_of(network: nn.Module, probe: Any) -> Float[Tensor, "N D"]:
    """`probe_output` without the check that items are independent."""
    with evaluating(network):
        output = run(network, probe)
    check_matrix(output, by_name=isinstance(probe, Mapping))
    if len(output) == 0:
        raise ValueError("the first batch is empty: finding the head needs at least one item")
    check_finite("the network's output on the first batch", output)
    return output


def check_matrix(output: Any, *, by_name: bool = False) -> None:
    """Reject an output of a network that is not a matrix (N, D); `by_name`: whether the network takes named inputs."""
    if isinstance(output, Tensor) and output.ndim == 1:
        raise ValueError(f"the batch gave shape {tuple(output.shape)}: {_ALONE}")
    if not isinstance(output, Tensor) or output.ndim != 2:
        call = f"self.network({'**' if by_name else ''}inputs)"
        raise ValueError(
            f"the network must map a batch to embeddings (N, D), got {_in_words(output)}: wrap it in a module with a "
            f"forward that returns them, such as {_selection(call, output)}"
        )


def _check_by_item(network: nn.Module, probe: Any, output: Tensor) -> None:
    with evaluating(network):
        norms = ((path, each) for path, each in network.named_modules() if isinstance(each, _BatchNorm))
        norm = next((path for path, each in norms if each.training or each.running_mean is None), None)
        if norm is not None:
            raise ValueError(
                f"{norm!r} ({type(network.get_submodule(norm)).__name__}) takes mean and variance from the batch, so "
                "an item's output depends on the others: let it track running statistics, and use them after "
                "network.eval()"
            )
        parts = probe.values() if isinstance(probe, Mapping) else [probe]
        if any(
            isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.shape[:1] != output.shape[:1])
            for part in parts
        ):
            return  # inputs without a row for each item cannot be cut
        beside_itself = run(network, items(probe, [0, 0]))[0].double()
    beside_others = output[0].double()
    most = RELATIVE_TOLERANCE.get(output.dtype, 1e-2) * beside_others.norm()
    if not (beside_itself - beside_others).norm() <= most:  # also true for NaN, such as from a zero variance
        raise ValueError(
            "the network's output for an item depends on the other items of its batch: in evaluation mode it must not "
            "draw random numbers, or compute statistics or attention over the batch"
        )


def _in_words(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"shape {tuple(output.shape)}"
    return type(output).__name__ + (f" of {', '.join(output)}" if isinstance(output, Mapping) else "")


def _selection(call: str, output: Any) -> str:
    """Python code that selects each matrix among several outputs."""
    parts = (
        output.items() if isinstance(output, Mapping) else enumerate(output) if isinstance(output, tuple | list) else ()
    )
    keys = [key for key, part in parts if isinstance(part, Tensor) and part.ndim == 2 and part.is_floating_point()]
    if not keys:
        return f"pool({call})"
    found = [f'{call}["{key}"]' if isinstance(key, str) else f"{call}[{key}]" for key in keys]
    return " or ".join(found) + (", whichever is the embedding" if len(found) > 1 else "")


def _same_direction(candidate: Any, output: Tensor) -> bool:
    """Whether every row of the output is a positive multiple of the candidate's row."""
    if not isinstance(candidate, Tensor) or candidate.shape != output.shape:
        return False
    gap = F.normalize(candidate.double(), dim=1) - F.normalize(output.double(), dim=1)
    return bool((gap.norm(dim=1) <= RELATIVE_TOLERANCE.get(output.dtype, 1e-4)).all())


def _list(linear: dict[str, nn.Linear]) -> str:
    if not linear:
        return "no linear layer"
    sizes = {path: f"({layer.in_features} -> {layer.out_features})" for path, layer in linear.items()}
    return "these linear layers: " + ", ".join(f"{path or 'the network itself'} {sizes[path]}" for path in linear)
