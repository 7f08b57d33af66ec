"""`LayersEncoder`: a network with a posterior over several of its layers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from lam.encoders.base import NO_INPUTS
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.files import SavedEncoder
from lam.posteriors import LAYERS_POSTERIORS, LayersPosterior, Posterior
from lam.posteriors.layers import LayersAccumulator


class LayersEncoder(BayesianEncoder):
    """A `BayesianEncoder` with a posterior over several layers; see `lam.posteriors.LayersPosterior`."""

    kind = "laplace_layers"
    posteriors: ClassVar[Mapping[str, type[Posterior]]] = LAYERS_POSTERIORS
    posterior: LayersPosterior

    def export(self, path: str | Path, example: Tensor | None = None, *, n_samples: int | None = None) -> None:
        """Raise a `ValueError`: only a posterior over the last layer can be exported."""
        raise ValueError(
            f"a {type(self.posterior).__name__} cannot be exported: the program would hold every sampled network, or "
            'the derivatives of one; fit with layers="last" for an encoder that can'
        )

    def _posterior_input(self, inputs: Any, features: Tensor) -> Any:
        if len(features) == 0:
            raise ValueError(NO_INPUTS)
        return inputs

    def _clipped_variance(self, features: Tensor) -> dict[str, float]:
        return {}  # the share depends on the inputs, not the features only

    def _curvature_of(self, batches: Iterable[tuple[Any, Any]]) -> tuple[Any, int]:
        posterior = self.posterior
        return LayersAccumulator(
            empty=posterior.curvature.empty(),
            relation=self.relation,
            seed=posterior.seed,
            network=posterior.network,
            head=posterior.head,
            layers=posterior.layers,
        ).accumulate(batches)

    @classmethod
    def _restore_posterior(cls, kind: Any, saved: SavedEncoder) -> Posterior:
        return kind.restored(saved.tensors, saved.settings["posterior"], network=saved.network, head=saved.head)
