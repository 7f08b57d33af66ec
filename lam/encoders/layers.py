"""`LayersEncoder`: a network with a posterior over several of its layers. Fitting one is in `lam.methods`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from lam.encoders.base import NO_INPUTS, at_least_float32
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.files import SavedEncoder
from lam.hessians import LayersCurvature
from lam.hessians.accumulate import pairs_of, targets_of
from lam.hessians.batch import check_feature_values, checked_partners, directions
from lam.models.head import evaluating, items
from lam.models.layers import head_output, linearised, rows_at_once
from lam.pairs.relation import Relation
from lam.posteriors import LAYERS_POSTERIORS, LayersPosterior, Posterior
from lam.utils.autocast import without_autocast

Layers = TypeVar("Layers", bound=LayersCurvature)


class LayersEncoder(BayesianEncoder):
    """As `BayesianEncoder`, with a posterior over layers of the network: see `lam.posteriors.LayersPosterior`."""

    kind = "laplace_layers"
    posteriors: ClassVar[Mapping[str, type[Posterior]]] = LAYERS_POSTERIORS
    posterior: LayersPosterior

    def export(self, path: str | Path, example: Tensor | None = None, *, n_samples: int | None = None) -> None:
        """Refused: see `BayesianEncoder.export` of a posterior over the last layer.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"a {type(self.posterior).__name__} cannot be exported: the program would hold every sampled network, or "
            'the derivatives of one; fit with layers="last" for an encoder that can'
        )

    def _entering(self, inputs: Any, features: Tensor) -> Any:
        if len(features) == 0:
            raise ValueError(NO_INPUTS)
        return inputs

    def _clipped_variance(self, features: Tensor) -> dict[str, float]:
        return {}  # it would take the inputs

    def _curvature_of(self, batches: Iterable[tuple[Any, Any]]) -> tuple[Any, int]:
        posterior = self.posterior
        paths = posterior.head, posterior.layers
        return curvature_of_layers(
            batches, posterior.network, *paths, self.relation, posterior.curvature.empty(), seed=posterior.seed
        )

    @classmethod
    def _restored_posterior(cls, kind: Any, saved: SavedEncoder) -> Posterior:
        return kind.restored(saved.tensors, saved.settings["posterior"], network=saved.network, head=saved.head)


@without_autocast()
def curvature_of_layers(
    batches: Iterable[tuple[Any, Any]],
    network: nn.Module,
    head: str,
    layers: Sequence[str],
    relation: Relation,
    empty: Layers,
    *,
    seed: int = 0,
) -> tuple[Layers, int]:
    """Curvature in the weights of layers, summed over batches of (inputs, targets).

    Args:
        batches: inputs of the network with (N,) labels or (N, X) positions each.
        network: in whose layers; it stays as it is.
        head: path of the layer that gives its outputs.
        layers: paths of the layers.
        relation: what makes a pair, and which of the pairs of a batch count.
        empty: the structure of no batch, with the curvature of the loss.
        seed: of what the mining draws.

    Returns:
        The sums, in float64, and the number of items.

    Raises:
        ValueError: for outputs that are not finite or have length zero, and as `lam.hessians.ggn_of_batch`.
    """
    total, n_total, curvature = empty, 0, empty.curvature
    for inputs, targets in batches:
        f = at_least_float32(head_output(network, head, inputs))
        check_feature_values(f, n_total, name="outputs")
        pairs = pairs_of(relation, targets_of(f, targets), lambda f=f: f, seed)
        n, r = directions(f.to(curvature.working_dtype(f)), f.dtype, offset=n_total)
        matrices = curvature.matrices(n, r, checked_partners(pairs, len(f), curvature))
        for rows in rows_at_once(network, head, layers, inputs, jacobians=empty.forms_jacobians):
            with evaluating(network):
                passes = linearised(network, head, layers, items(inputs, rows))[1]
                total = total + empty.of_passes(passes, matrices[rows])
        total = replace(total, counts=tuple(map(add, total.counts or (), curvature.counts(pairs))))
        n_total += len(f)
    return total, n_total
