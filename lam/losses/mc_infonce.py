"""MCInfoNCE: InfoNCE over samples of each item's distribution, to learn the posterior of the item's latent variable."""

from typing import Any

import torch
from torch import Tensor, nn

from lam.losses.distributions import DistributionLoss, drawn_negatives, mean_log_ratio, samples_of
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_at_least, check_positive
from lam.vmf.bessel import bessel_ratio, kappa_from_resultant


class MCInfoNCE(DistributionLoss):
    """Mean over positive pairs of −log 1/S Σ_s e^(κ_pos z_s·z⁺_s) / (e^(κ_pos z_s·z⁺_s) + Σ_m e^(κ_pos z_s·z⁻_ms)).

    z_s, z⁺_s and z⁻_ms are the s-th samples of an anchor, its match and its m-th of M negatives. The source divides the
    denominator by M, which subtracts log M from the loss. Without this factor, the limit of large κ is InfoNCE at
    temperature 1/κ_pos. The logarithm of a mean over few samples is biased: κ becomes too large, above all a large κ.

    Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric
    uncertainty of ambiguous inputs", equations 5 to 7. κ_pos = 20 is from appendix B.3. In table 7, with 512 samples,
    32 negatives are best; by figure 3, 16 samples are enough.

    Args:
        kappa_pos: concentration of the latent variables of a positive pair around each other, > 0.
        n_samples: S ≥ 1.
        n_negatives: M ≥ 1 random negatives of each anchor; None for all in the batch.
        learn_kappa_pos: whether the logarithm of κ_pos is learned, starting from the value of `kappa_pos`.

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.full((3,), torch.inf)
        >>> loss = MCInfoNCE(kappa_pos=1.0, n_samples=4)
        >>> round(float(loss(mean, kappa, Pairs.by_label(torch.tensor([0, 0, 1])))), 3)
        0.313
    """

    def __init__(
        self,
        kappa_pos: float = 20.0,
        n_samples: int = 16,
        n_negatives: int | None = None,
        *,
        learn_kappa_pos: bool = False,
    ) -> None:
        super().__init__()
        check_positive("kappa_pos", kappa_pos)
        check_at_least("n_samples", n_samples, 1)
        check_at_least("n_negatives", n_negatives, 1)
        self.n_samples, self.n_negatives = n_samples, n_negatives
        log_kappa_pos = torch.tensor(kappa_pos).log()
        if learn_kappa_pos:
            self.log_kappa_pos = nn.Parameter(log_kappa_pos)
        else:
            self.register_buffer("log_kappa_pos", log_kappa_pos)

    def learned(self) -> dict[str, list[float]]:
        """κ_pos, if it is learned."""
        return {"kappa_pos": [self.log_kappa_pos.exp().item()]} if self.log_kappa_pos.requires_grad else {}

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The curvature of InfoNCE; 1/τ is the concentration of the means of a positive pair around each other.

        Two means of a pair differ by three von Mises-Fisher steps: from a mean to its latent variable, to the other
        latent variable, and to the other mean. Their mean resultant lengths are multiplied.

        Source: Mardia and Jupp (2000), "Directional statistics", section 9.3.2, for the convolution.
        """
        kappa_pos = float(self.log_kappa_pos.detach().exp())
        resultant = bessel_ratio(dimension, torch.tensor([kappa, kappa, kappa_pos]).double())
        return {"name": "infonce", "temperature": 1 / float(kappa_from_resultant(resultant.prod(), dimension))}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        samples = samples_of(mean, kappa, self.n_samples, generator)
        return -mean_log_ratio(samples, self.log_kappa_pos.exp(), drawn_negatives(pairs, self.n_negatives, generator))
