"""An encoder as one `torch.export` program, for serving without lam."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.models.head import ADDED, evaluating, head_input_and_output
from lam.posteriors.base import Predictor
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_tensor
from lam.utils.files import write_atomically


class _Program(nn.Module):
    """Map inputs to features, mean, κ, variance and, if learnt, the parts of κ."""

    def __init__(self, network: nn.Module, head: str, predict: Predictor) -> None:
        super().__init__()
        self.network = network
        self._head, self._predict = head, predict

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        features, output = head_input_and_output(self.network, self._head, inputs)
        embeddings = self._predict(features, None if self._head == ADDED else output)
        features = features.to(torch.promote_types(features.dtype, torch.float32))  # as `Encoder.predict` does
        return features, embeddings.mean, embeddings.kappa, embeddings.variance, *embeddings.parts().values()


def check_example(example: Any) -> None:
    """Require a tensor: a program has one input."""
    if isinstance(example, Mapping):
        names = ", ".join(map(str, example))
        raise ValueError(
            f"example must be a tensor, got named inputs ({names}): a program has one input; fit a module that takes "
            "one tensor and calls the network, and export that encoder"
        )
    check_tensor("example", example)


@without_autocast()  # a program exported under autocast would run only under autocast
def export_encoder(
    path: str | Path, example: Float[Tensor, "N ..."], network: nn.Module, head: str, predict: Predictor
) -> None:
    """Write the program of a network and its head; see `BayesianEncoder.export`.

    `predict` maps features, and the network's output (None for an added head), to embeddings. If the example has N ≥ 2
    items, the program takes batches of any size.
    """
    if len(example) < 2:
        raise ValueError(
            f"the example must hold at least 2 inputs, so that the batch size stays free, got {len(example)}"
        )
    program = _Program(network, head, predict)
    with evaluating(program):
        exported = torch.export.export(program, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor")  # torch warns of complete channels_last weights too
        torch.export.save(exported, content)
    write_atomically(path, lambda temporary: temporary.write_bytes(content.getvalue()))
