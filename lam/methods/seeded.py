"""What methods share that need one trained network and a seed: their encoders, and the training items they look at.

Those whose κ is a function of the features, `norm` and `knn_distance`, are a `ConcentrationEncoder`; `mc_dropout` is a
`SeededEncoder`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import Subset

from lam.augmentation import without_augmentation
from lam.bessel import bessel_ratio_complement
from lam.embeddings import KAPPA_RANGE, Embeddings
from lam.encoder_base import Encoder, Observations, Observer, common_of, own_direction, widened
from lam.encoder_files import SavedEncoder
from lam.head import features_and_output
from lam.methods.deterministic import DeterministicEncoder
from lam.training.batches import Batches, derive_seed
from lam.vmf import VonMisesFisher

REFERENCE_BATCH = 250


class SeededEncoder(DeterministicEncoder):
    """A trained network, and a seed for all that is drawn when it embeds.

    Args:
        network: maps (N, ...) inputs to (N, D) by a linear layer at its end, normalised or not.
        head: path of that layer.
        seed: of everything drawn; torch's global generator is not used.
        common: `relation`, `preprocessing` and `ood_score` of `Encoder`.
    """

    has_kappa = True

    def __init__(self, network: nn.Module, head: str, *, seed: int = 0, **common: Any) -> None:
        super().__init__(network, head, **common)
        self.seed = seed

    @classmethod
    def upon(cls, encoder: Encoder, **own: Any) -> "SeededEncoder":
        """Take over the network of another encoder, with what is known of its inputs.

        Args:
            encoder: whose network, head, relation and preprocessing are kept.
            own: the further arguments of this class.
        """
        common = {"relation": encoder.relation, "preprocessing": encoder.preprocessing}
        network: Any = encoder.network
        return cls(network, encoder.head, **common, **own)

    def settings(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": self.seed}

    @classmethod
    def restored(cls, saved: SavedEncoder) -> "SeededEncoder":
        """Make the encoder again from what `save` wrote."""
        network: Any = saved.network
        return cls(network, saved.head, **saved.settings, **saved.tensors, **common_of(saved))

    def unnormalised(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N D"]:
        """Give what the head makes of features, before normalisation, float32 or wider."""
        with torch.no_grad():
            return widened(self._module.get_submodule(self.head)(features))

    def drawn(
        self, places: Iterable[int], draw: Callable[[int, torch.Generator], Float[Tensor, "S D"]]
    ) -> Float[Tensor, "S N D"]:
        """Draw for N items one by one, each from a generator of its own: the same however a pass is cut into batches.

        Args:
            places: of the items in the whole pass, counted from 0.
            draw: gives what is drawn for one of the N, by its number among them and its generator; this is on the CPU,
                so that every device sees the same.
        """
        generators = (torch.Generator().manual_seed(derive_seed(self.seed, place)) for place in places)
        return torch.stack([draw(number, generator) for number, generator in enumerate(generators)], 1)


class ConcentrationEncoder(SeededEncoder):
    """Embed by the network's own direction, with a κ that is a function of the features.

    The resultant is A_D(κ), and `variance` is 1 − A_D(κ)², as there is no distribution before normalisation. Samples
    are drawn from the von Mises-Fisher distribution, every item for itself; they follow from the seed and the item's
    place in the pass, however that is cut into batches.
    """

    @abstractmethod
    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """Give κ ≥ 0, float64, of what enters the head; beyond `KAPPA_RANGE` it is cut to the nearest end."""

    def observer(self, *, n_samples: int, joint: bool = False) -> Observer:
        """Give what a batch goes through; `n_samples` are drawn only with `joint`."""
        seen = 0

        def observe(inputs: Any) -> Observations:
            nonlocal seen
            features, output = features_and_output(self._module, self.head, inputs)
            mean = own_direction(output)
            kappa = self.concentration(features).clamp(*KAPPA_RANGE)
            rest = bessel_ratio_complement(self.dimension, kappa)
            known = (kappa.to(mean), (1 - rest).to(mean), (rest * (2 - rest)).to(mean))
            samples = None
            if joint:
                items = list(zip(mean.cpu(), kappa.cpu(), strict=True))
                samples = self.drawn(
                    range(seen, seen + len(items)),
                    lambda number, generator: VonMisesFisher(*items[number]).sample((n_samples,), generator=generator),
                ).to(mean)
            seen += len(mean)
            return Observations(features, Embeddings(mean, *known), samples)

        return observe


def reference_inputs(dataset: Any, size: int, *, seed: int) -> Iterator[Any]:
    """Give batches of inputs of items drawn at random without replacement, none of them augmented.

    Args:
        dataset: of (input, label).
        size: how many items; all of them where there are no more.
        seed: of the draw, and of what the data set itself draws; torch's global generator is left as it was.
    """
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    batches = Batches(Subset(without_augmentation(dataset), chosen), batch_size=REFERENCE_BATCH, seed=seed, epoch=0)
    return (batches[number][0] for number in range(len(batches)))
