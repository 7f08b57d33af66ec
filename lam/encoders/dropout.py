"""Monte-Carlo dropout at inference: S thinned networks (with some units dropped), the same for all items.

Source: Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import Prediction, Predictor
from lam.encoders.deterministic import SeededEncoder
from lam.models.head import features_and_output, network_lock
from lam.models.weights import plain_names
from lam.utils.random import derive_seed
from lam.vmf.embeddings import Embeddings

Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d


class DropoutEncoder(SeededEncoder):
    """Embed by S thinned networks: the mean direction of their embeddings, and κ from their spread.

    Sample s is one thinned network. Its dropout masks depend only on the seed and s, and all items share them (torch
    would draw a mask for each item; the sources leave this open). So samples are comparable across items, and the κ of
    an item is the same in any batch. `variance` is the variance of the outputs before normalisation, summed over D.
    `features` come from a pass without dropout.

    Embedding takes S + 1 passes through the network, or one if the only dropout is right before the head.
    """

    kind = "mc_dropout"

    def __init__(self, network: nn.Module, head: str, **common: Any) -> None:
        check_network(network)
        super().__init__(network, head, **common)

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        def predict(inputs: Any, offset: int) -> Prediction:
            features, outputs = self._outputs(inputs, n_samples)
            samples = F.normalize(outputs, dim=-1)
            variance = outputs.var(0).sum(1) if len(features) else outputs.new_zeros(0)
            embeddings = Embeddings.from_samples(samples, variance)
            return Prediction(features, embeddings, samples if joint else None)

        return predict

    def _outputs(self, inputs: Any, n_samples: int) -> tuple[Tensor, Tensor]:
        """Features (N, P) without dropout and sampled outputs (S, N, D) before normalisation."""
        network, head = self.network, self.head
        dropped: list[tuple[str, Any]] = []
        with _hooks(network, lambda path: lambda _layer, _inputs, output: dropped.append((path, output))):
            features, _ = features_and_output(network, head, inputs)
        if len(dropped) == 1 and dropped[0][1] is features:  # masks on the features save S passes
            path = dropped[0][0]
            seeds, layer = (derive_seed(self.seed, s, path) for s in range(n_samples)), dropouts_of(network)[path]
            samples = (features * mask_of(layer, features, seed) for seed in seeds)
        else:
            samples = (self._thinned_features(inputs, s) for s in range(n_samples))
        return features, torch.stack([self.unnormalised(sample) for sample in samples])

    def _thinned_features(self, inputs: Any, sample: int) -> Tensor:
        with thinned(self.network, seed=self.seed, sample=sample):
            return features_and_output(self.network, self.head, inputs)[0]


@contextmanager
def thinned(network: nn.Module, *, seed: int, sample: int) -> Iterator[None]:
    """Within the context, each dropout layer of a network in evaluation mode applies one mask to all items.

    A layer that runs twice in one pass applies the same mask twice. The masks follow from seed and sample.
    """

    def masked(path: str) -> Callable[..., Tensor]:
        own = derive_seed(seed, sample, path)
        return lambda layer, _inputs, output: output * mask_of(layer, output, own)

    with _hooks(network, masked):
        yield


def mask_of(module: Dropout, values: Float[Tensor, "N ..."], seed: int) -> Float[Tensor, "1 ..."]:
    """Mask of a dropout layer: 0 or 1/(1 − rate) for each value, or for each channel if the layer drops channels.

    The CPU draws the mask, so that every device has the same one.
    """
    shape = values.shape[1:] if isinstance(module, nn.Dropout) else (values.shape[1], *[1] * (values.ndim - 2))
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1, *shape, generator=generator, dtype=torch.float32) >= module.p  # not torch's default type
    return keep.to(values) / (1 - module.p)


def dropouts_of(network: nn.Module) -> dict[str, Dropout]:
    """The dropout layers of a network with a rate in (0, 1), by path without the prefixes of wrappers."""
    layers = {
        path: module for path, module in network.named_modules() if isinstance(module, Dropout) and 0 < module.p < 1
    }
    return {plain: layers[path] for path, plain in plain_names(layers).items()}


def check_network(network: nn.Module) -> None:
    """Reject a network without dropout; the error says how to add it."""
    if not dropouts_of(network):
        raise ValueError(
            "mc_dropout needs a network with dropout layers of a rate in (0, 1), got no such layer: build it with the "
            "option dropout, such as network.options.dropout=0.05, or put nn.Dropout between its layers"
        )


@contextmanager
def _hooks(network: nn.Module, hook: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Within the context, each dropout layer of a network runs the forward hook `hook(path)`."""
    with network_lock, ExitStack() as hooks:
        for path, module in dropouts_of(network).items():
            hooks.enter_context(module.register_forward_hook(hook(path)))
        yield
