"""The head: the linear layer that gives a network's output, and what enters it.

A posterior over any other layer would be wrong: in a classifier the last linear layer gives class logits, in many
sentence encoders it does not feed the output at all. So the head is not guessed but found on a probe batch. A network
without one can have a layer added after it (`ADDED`), whose weights lie in the posterior alone.
"""

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.utils.autocast import without_autocast

RELATIVE_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}

ADDED = "(added)"
"""In place of a head's path: a layer after the network, which what the network gives enters."""

running = threading.RLock()
"""Held while hooks, modes or weights of a network are changed and it runs: modules may be shared between networks."""

_ALONE = "give inputs[None] for one item alone"
_ADD = 'Or let lam.fit add a layer after the network: head="train", or, to keep its embeddings, head="identity"'


def default_head(network: nn.Module, head: str | None) -> str | None:
    """The head asked for; of a TorchScript network, whose layers cannot be reached, by default `identity`."""
    return "identity" if head is None and isinstance(network, torch.jit.ScriptModule) else head


def find_head(network: nn.Module, probe: Any, head: str | None = None) -> str:
    """Path of the linear layer that gives the direction of the network's output.

    The output is a positive multiple of that layer's own: the same, normalised, or, as for ArcFace, scaled, by one
    factor or by one an item.

    Args:
        network: any module; it is run once, in evaluation mode.
        probe: a batch of its inputs.
        head: the path of a layer to hold to the same test; by default every linear layer is tried.

    Returns:
        The layer's path in the network. Where several give the output, the one that ran last.

    Raises:
        ValueError: listing the linear layers with their shapes, where none, or not the named one, gives the output;
            where it does something else than a linear layer; or as `probe_output`.
    """
    linear = {path: module for path, module in network.named_modules() if isinstance(module, nn.Linear)}
    if head is not None and head not in linear:
        raise ValueError(f"head {head!r} is no linear layer of the network, which has {_listed(linear)}. {_ADD}")
    with recorded(network, linear) as recording:
        output = _embeddings_of(network, probe)
        calls = dict(recording)
        _check_by_item(network, probe, output)  # recorded, as torch.compile may forget hooks for good otherwise
    matching = [path for path, passes in calls.items() if passes and _same_direction(passes[-1][1], output)]
    if head is not None:
        matching = [path for path in matching if path == head]
    if not matching:
        which = "no linear layer gives" if head is None else f"head {head!r} does not give"
        raise ValueError(
            f"{which} the direction of the network's output {tuple(output.shape)}; the network has {_listed(linear)}. "
            f"Make the embedding the output of a linear layer, followed at most by a normalisation or a scale. {_ADD}"
        )
    with evaluating(network):  # in which reading a spectral norm's weight changes nothing
        for path in reversed(matching):
            layer, (entered, _) = linear[path], calls[path][-1]
            with without_autocast():  # as a head may have run without it
                given = F.linear(entered[0].to(layer.weight.dtype), layer.weight, layer.bias)
            if _same_direction(given.to(output.dtype), output):
                return path
    raise ValueError(
        f"head {matching[-1]!r} ({type(linear[matching[-1]]).__name__}) gives the network's output, but not as its "
        "weight times what enters it, plus its bias: change what enters it, or its weight, in a layer or a "
        f"parametrization of its own. {_ADD}"
    )


def probe_output(network: nn.Module, probe: Any) -> Float[Tensor, "N D"]:
    """Output of a network on one batch, in evaluation mode; what is no batch of embeddings is refused.

    Raises:
        ValueError: where the network does not take the batch by name, or its output is not a matrix (N, D), with how to
            wrap it so that it does; where the output is empty or not finite; or where that of an item depends on the
            others of its batch, as with batch norm in training mode, or is random.
    """
    output = _embeddings_of(network, probe)
    _check_by_item(network, probe, output)
    return output


def features_and_output(network: nn.Module, head: str, inputs: Any) -> tuple[Float[Tensor, "N P"], Tensor]:
    """What enters the head, and the network's output, of a batch run through it in evaluation mode.

    Raises:
        ValueError: where what enters the head is not a matrix (N, P).
    """
    is_scripted = isinstance(network, torch.jit.ScriptModule)  # which takes no hooks, and needs none
    recording = nullcontext([]) if head == ADDED and is_scripted else recorded_head_inputs(network, head)
    with evaluating(network), recording as head_inputs:
        output = run(network, inputs)
    if head == ADDED and is_scripted:
        head_inputs.append(output)
    features = head_inputs[-1] if head_inputs else None
    if not isinstance(features, Tensor) or features.ndim != 2:
        actual = "nothing" if not head_inputs else f"shape {tuple(getattr(features, 'shape', ()))}"
        actual += f": {_ALONE}" if getattr(features, "ndim", 0) == 1 else ""
        raise ValueError(f"features must enter head {head!r} as (N, P), got {actual}")
    return features, output


@contextmanager
def recorded_head_inputs(network: nn.Module, head: str) -> Iterator[list[Any]]:
    """A list to which all that enters the head, by position or by name, is added while the network runs."""
    head_inputs: list[Any] = []
    own = threading.get_ident()

    def record(value: Any) -> None:
        if _runs_in(own):
            head_inputs.append(value)

    with running:
        if head == ADDED:
            handle = network.register_forward_hook(lambda _module, _inputs, output: record(output))
        else:
            handle = network.get_submodule(head).register_forward_pre_hook(
                lambda _module, args, kwargs: record(args[0] if args else kwargs["input"]), with_kwargs=True
            )
        try:
            yield head_inputs
        finally:
            handle.remove()


@contextmanager
def recorded(network: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[tuple[tuple[Any, ...], Any]]]]:
    """What enters and leaves layers while the network runs, by path; with gradients, a graph starts here.

    What goes on is a copy, so that what later layers change in place is not what was recorded. The layer that ran last
    stands last.
    """
    calls: dict[str, list[tuple[tuple[Any, ...], Any]]] = {path: [] for path in paths}

    own = threading.get_ident()

    def record(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not _runs_in(own):
            return output
        entered = (*args, *kwargs.values())
        entered = tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in entered)
        if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
            output = output.detach().requires_grad_(output.is_floating_point())
        calls[path] = [*calls.pop(path), (entered, output)]
        return output.clone() if isinstance(output, Tensor) else output

    with running:
        handles = [
            network.get_submodule(path).register_forward_hook(
                lambda _module, args, kwargs, output, path=path: record(path, args, kwargs, output), with_kwargs=True
            )
            for path in calls
        ]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()


def run(network: nn.Module, inputs: Any) -> Any:
    """Output of a network on a batch, on the network's own device.

    A batch of named inputs is passed by name; one that is alone is passed by position where the network gives it
    another name.

    Raises:
        ValueError: for a network without weights, a batch that is neither tensor nor dictionary, inputs without values,
            names that the network does not take, or a shape or type that it does not take.
    """
    parameter = next(network.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if any(each.is_meta for each in network.parameters()):
        raise ValueError(
            "the network or a part of it is on the meta device, where it has shapes and no weights: make it on a "
            'device that has memory, or call network.to_empty(device="cpu") and load its weights'
        )
    if isinstance(inputs, Mapping):
        given, named = _arguments(network, inputs)
    elif isinstance(inputs, Tensor):
        given, named = [inputs], {}
    else:
        advice = ": give preprocessing(image)[None]" if hasattr(inputs, "__array_interface__") else ""
        raise ValueError(
            f"a batch of inputs must be a tensor or a dictionary of named inputs, got {type(inputs).__name__}{advice}"
        )
    if any(isinstance(each, Tensor) and each.is_meta for each in (*given, *named.values())):
        raise ValueError("the inputs are on the meta device, where tensors have shapes and no values")
    try:
        return network(*[_on(device, each) for each in given], **{name: _on(device, named[name]) for name in named})
    except RuntimeError as error:
        if len(given) == 1 and isinstance(given[0], Tensor) and (reason := _refusal(given[0], parameter, str(error))):
            raise ValueError(reason) from error
        raise


def _arguments(network: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Named inputs as a network takes them: by position and by name."""
    try:
        inspect.signature(network.forward).bind(**inputs)
    except TypeError as error:
        if len(inputs) == 1:
            return list(inputs.values()), {}
        raise ValueError(
            f"the network must take a batch of {', '.join(inputs)} by name, it does not ({error}): wrap it in a "
            "module whose forward(self, **inputs) returns embeddings (N, D), made with self.network(inputs)"
        ) from None
    return [], dict(inputs)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _refusal(inputs: Tensor, parameter: Tensor | None, error: str) -> str | None:
    """What to write in place of inputs that a network did not take, where their type or shape is the reason."""
    reason = error.splitlines()[0]
    if parameter is not None and inputs.dtype != parameter.dtype:
        scaled = "" if inputs.is_floating_point() else ", scaled and normalised as in training"
        return (
            f"the network does not take inputs of {inputs.dtype} ({reason}): its weights are {parameter.dtype}, so "
            f"convert them, inputs.to({parameter.dtype}){scaled}"
        )
    if not any(words in error for words in ("channels", "mat1 and mat2", "shape")):
        return None
    refused = f"the network does not take inputs of shape {tuple(inputs.shape)} ({reason}): "
    if inputs.ndim in (3, 4):
        return (
            f"{refused}images are (N, C, H, W); give inputs[None] for one image alone, inputs.permute(0, 3, 1, 2) for "
            "(N, H, W, C)"
        )
    return f"{refused}give them as in training, with a row for each item"


def items(inputs: Any, rows: slice | list[int]) -> Any:
    """Some of the items of a batch; of named inputs, its tensors have a row for each."""
    if isinstance(inputs, Mapping):
        return {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return inputs[rows]


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """The network in evaluation mode, without gradients; afterwards every module is back in its own mode."""
    with running:
        training = [module for module in network.modules() if module.training]
        if training:
            network.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True


def _runs_in(thread: int) -> bool:
    """Whether this is the given thread. Hooks use it to ignore other threads that call the network.

    Always true while torch compiles: a compiled program cannot ask, and it is compiled under `running`.
    """
    return torch.compiler.is_compiling() or threading.get_ident() == thread


def _embeddings_of(network: nn.Module, probe: Any) -> Float[Tensor, "N D"]:
    """`probe_output`, whatever it depends on."""
    with evaluating(network):
        output = run(network, probe)
    if not isinstance(output, Tensor) or output.ndim != 2:
        if isinstance(output, Tensor) and output.ndim == 1:
            raise ValueError(f"the batch gave shape {tuple(output.shape)}: {_ALONE}")
        call = f"self.network({'**' if isinstance(probe, Mapping) else ''}inputs)"
        raise ValueError(
            f"the network must map a batch to embeddings (N, D), it gave {_in_words(output)}: wrap it in a module "
            f"whose forward returns them, such as {_selection(call, output)}"
        )
    if len(output) == 0:
        raise ValueError("the first batch is empty: the head cannot be found on it")
    if not output.isfinite().all():
        raise ValueError("the network's output on the first batch is not finite")
    return output


def _check_by_item(network: nn.Module, probe: Any, output: Tensor) -> None:
    """Refuse a network that gives an item something else beside itself than beside the others of its batch."""
    with evaluating(network):
        norm = next((path for path, module in network.named_modules() if _is_norm_of_batch(module)), None)
        if norm is not None:
            raise ValueError(
                f"{norm!r} ({type(network.get_submodule(norm)).__name__}) takes mean and variance from the batch, as "
                "batch norm does in training mode, so that an item has no outputs of its own: let it track running "
                "statistics, and go by them after network.eval()"
            )
        parts = probe.values() if isinstance(probe, Mapping) else [probe]
        if any(
            isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.shape[:1] != output.shape[:1])
            for part in parts
        ):
            return  # what has no row for each item cannot be cut
        beside_itself = run(network, items(probe, [0, 0]))[0].double()
    beside_others = output[0].double()
    most = RELATIVE_TOLERANCE.get(output.dtype, 1e-2) * beside_others.norm()
    if not (beside_itself - beside_others).norm() <= most:  # NaN, too, as of a variance that is zero
        raise ValueError(
            "the network gives an item something else beside itself than beside the others of its batch: in evaluation "
            "mode it must not draw numbers, nor take statistics or attention over the batch"
        )


def _is_norm_of_batch(module: nn.Module) -> bool:
    """Whether a batch norm takes its statistics from the batch in evaluation mode, too."""
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and (module.training or module.running_mean is None)


def _in_words(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"shape {tuple(output.shape)}"
    return type(output).__name__ + (f" of {', '.join(output)}" if isinstance(output, Mapping) else "")


def _selection(call: str, output: Any) -> str:
    """Code that selects a matrix among several outputs, for each that there is."""
    parts = output.items() if isinstance(output, Mapping) else enumerate(output) if isinstance(output, tuple) else ()
    keys = [key for key, part in parts if isinstance(part, Tensor) and part.ndim == 2 and part.is_floating_point()]
    if not keys:
        return f"pool({call})"
    found = [f'{call}["{key}"]' if isinstance(key, str) else f"{call}[{key}]" for key in keys]
    return " or ".join(found) + (", whichever is the embedding" if len(found) > 1 else "")


def _same_direction(candidate: Any, output: Tensor) -> bool:
    """Whether every row of the output is a positive multiple of the candidate's."""
    if not isinstance(candidate, Tensor) or candidate.shape != output.shape:
        return False
    gap = F.normalize(candidate.double(), dim=1) - F.normalize(output.double(), dim=1)
    return bool((gap.norm(dim=1) <= RELATIVE_TOLERANCE.get(output.dtype, 1e-4)).all())


def _listed(linear: dict[str, nn.Linear]) -> str:
    if not linear:
        return "no linear layer"
    return "these linear layers: " + ", ".join(
        f"{path or 'the network itself'} ({module.in_features} -> {module.out_features})"
        for path, module in linear.items()
    )
