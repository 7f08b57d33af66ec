"""An encoder as one `torch.export` program, for serving without lam."""

import io
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.autocast import without_autocast
from lam.files import write_atomically
from lam.head import caught_input, evaluating
from lam.posterior import LastLayerPosterior


class _Program(nn.Module):
    """Inputs -> (features, mean, κ, variance), with marginal samples of the posterior's own noise."""

    def __init__(self, network: nn.Module, head: str, posterior: LastLayerPosterior, n_samples: int) -> None:
        super().__init__()
        self.network = network
        self._head = head
        self._predict = posterior.unchecked_predictor(n_samples=n_samples)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with caught_input(self.network, self._head) as caught:
            self.network(inputs)
        embeddings = self._predict(caught[-1])
        return caught[-1], embeddings.mean, embeddings.kappa, embeddings.variance


@without_autocast()  # or the program would work under autocast alone
def export_encoder(
    path: str | Path,
    example: Float[Tensor, "N ..."],
    network: nn.Module,
    head: str,
    posterior: LastLayerPosterior,
    *,
    n_samples: int,
) -> None:
    """Write the program; see `BayesianEncoder.export`."""
    if len(example) < 2:
        raise ValueError(
            f"the example must hold at least 2 inputs, so that the batch size stays free, got {len(example)}"
        )
    program = _Program(network, head, posterior, n_samples)
    with evaluating(program):
        exported = torch.export.export(program, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = io.BytesIO()
    torch.export.save(exported, content)
    write_atomically(path, lambda temporary: temporary.write_bytes(content.getvalue()))
