"""Losses on von Mises-Fisher distributions: their base `DistributionLoss`, and MCInfoNCE, ELK and HIB."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.base import weighted_mean
from lam.losses.softmax import log_ratios, log_weighted_sum, mean_cross_entropy
from lam.pairs.pairs import Pairs
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_length, check_no_nan, check_positive
from lam.vmf.bessel import bessel_ratio, kappa_from_resultant, log_normalizer
from lam.vmf.distribution import VonMisesFisher
from lam.vmf.embeddings import KAPPA_RANGE


class DistributionLoss(nn.Module, ABC):
    """A loss on von Mises-Fisher distributions and their pairs; its parameters, if any, are trained with the network.

    Attributes:
        dimension: D of the means; None for any.
    """

    dimension: int | None = None

    @without_autocast()
    def forward(
        self,
        mean: Float[Tensor, "N D"],
        kappa: Float[Tensor, " N"],
        pairs: Pairs,
        *,
        generator: torch.Generator | None = None,
        **own: Any,
    ) -> Float[Tensor, ""]:
        """Loss of a batch; lower is better.

        Args:
            mean: (N, D) unit rows, the mean directions. Means and κ in half precision become float32.
            kappa: (N,) concentrations ≥ 0; outside `KAPPA_RANGE` they are clamped and have no gradient.
            pairs: the pairs among these N items.
            generator: generator of the samples, on the device of `mean`; by default torch's global generator.
            own: arguments that only this loss takes.

        Raises:
            ValueError: for pairs or κ of another number of items, means of another dimension, no positive pair, or a κ
                that is NaN.
        """
        if self.dimension not in (None, mean.shape[1]):
            raise ValueError(f"the loss is made for {self.dimension} dimensions, got means of {mean.shape[1]}")
        pairs.check_size(len(mean))
        pairs.check_positives()
        check_length("kappa", kappa, "the means", len(mean))
        check_no_nan("kappa", kappa)
        mean, kappa = (values.to(torch.promote_types(values.dtype, torch.float32)) for values in (mean, kappa))
        return self._compute(mean, kappa.clamp(*KAPPA_RANGE), pairs, generator, **own)

    def learned(self) -> dict[str, list[float]]:
        """Learned values, each under the name of the method's option."""
        return {}

    @abstractmethod
    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """Name and settings of the curvature of this loss, or of a similar one, in the mean directions at this κ."""

    @abstractmethod
    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor: ...


def samples_of(
    mean: Tensor, kappa: Tensor, n_samples: int, generator: torch.Generator | None
) -> Float[Tensor, "S N D"]:
    """Samples of all items, with gradients."""
    return VonMisesFisher(mean, kappa, validate_args=False).rsample((n_samples,), generator=generator)


def drawn_negatives(pairs: Pairs, n_negatives: int | None, generator: torch.Generator | None) -> Pairs:
    """The pairs with at most `n_negatives` random negatives of each anchor, without replacement; None keeps all.

    The positive pairs stay the same. The matrix `negative` is no longer symmetric.
    """
    if n_negatives is None or n_negatives >= pairs.size:
        return pairs
    noise = torch.rand(pairs.negative.shape, generator=generator, device=pairs.negative.device)
    order = noise.masked_fill(pairs.negative == 0, -1.0).topk(n_negatives, 1).indices
    kept = torch.zeros_like(pairs.negative).scatter(1, order, pairs.negative.gather(1, order))
    return Pairs(pairs.positive, kept, pairs.n_positives, int(kept.sum()), pairs.labels)


def mean_log_ratio(samples: Float[Tensor, "S N D"], scale: Tensor, pairs: Pairs) -> Float[Tensor, ""]:
    """Mean over positive pairs of log 1/S Σ_s ratio_s, with ratio_s for sample s of S as in `log_ratios`.

    The logits of ratio_s are `scale` times the cosines of the items' s-th samples. If at most half of the items are a
    negative of some anchor, the code computes only the cosines that the ratios need.
    """
    columns = pairs.negative.any(0).nonzero()[:, 0]
    if 2 * len(columns) > pairs.size:
        ratios, weights = log_ratios(scale * (samples @ samples.transpose(1, 2)), pairs)
    else:
        anchor, positive = pairs.positive.nonzero(as_tuple=True)
        rows, row_of_anchor = anchor.unique(return_inverse=True)
        own = scale * (samples[:, anchor] * samples[:, positive]).sum(-1)
        logits = scale * (samples[:, rows] @ samples[:, columns].transpose(1, 2))
        negatives = log_weighted_sum(logits, pairs.negative[rows[:, None], columns])
        ratios, weights = own - torch.logaddexp(own, negatives[:, row_of_anchor]), pairs.positive[anchor, positive]
    return weighted_mean(ratios.logsumexp(0) - math.log(len(samples)), weights)


class MCInfoNCE(DistributionLoss):
    """Mean over positive pairs of −log 1/S Σ_s e^(κ_pos z_s·z⁺_s) / (e^(κ_pos z_s·z⁺_s) + Σ_m e^(κ_pos z_s·z⁻_ms)).

    z_s, z⁺_s and z⁻_ms are the s-th samples of an anchor, its match and its m-th negative. The paper also divides the
    denominator by M, which subtracts log M from the loss. lam does not, so the loss becomes InfoNCE at temperature
    1/κ_pos for large κ. With few samples, this loss makes κ too large, above all where κ is large.

    Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric
    uncertainty of ambiguous inputs", equations 5 to 7. κ_pos = 20 is from appendix B.3. In table 7, with 512 samples,
    32 negatives are best; by figure 3, 16 samples are enough.

    Args:
        kappa_pos: concentration of one latent variable of a positive pair around the other, > 0.
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
        """The curvature of InfoNCE; 1/τ is the concentration of one mean of a positive pair around its partner.

        Two means of a pair differ by three von Mises-Fisher steps: from a mean to its latent variable, to the other
        latent variable, and to the other mean. The mean resultant lengths of the steps are multiplied.

        Source: Mardia and Jupp (2000), "Directional statistics", section 9.3.2, for the convolution.
        """
        kappa_pos = float(self.log_kappa_pos.detach().exp())
        resultant = bessel_ratio(dimension, torch.tensor([kappa, kappa, kappa_pos]).double())
        return {"name": "infonce", "temperature": 1 / float(kappa_from_resultant(resultant.prod(), dimension))}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        samples = samples_of(mean, kappa, self.n_samples, generator)
        return -mean_log_ratio(samples, self.log_kappa_pos.exp(), drawn_negatives(pairs, self.n_negatives, generator))


class ELK(DistributionLoss):
    """InfoNCE with the similarity κ_pos log ∫ vMF(z; μ₁, κ₁) vMF(z; μ₂, κ₂) dz, without sampling.

    Source: Kirchhof, Kasneci and Oh (2023), equation 55; Kirchhof et al. (2022), "A non-isotropic probabilistic take on
    proxy-based deep metric learning", for the closed form.

    Args:
        kappa_pos: factor of the similarity, > 0: the inverse of a temperature.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([8.0, 8.0, 8.0])
        >>> ELK(kappa_pos=1.0)(mean, kappa, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(0.0109)
    """

    def __init__(self, kappa_pos: float = 1.0) -> None:
        super().__init__()
        check_positive("kappa_pos", kappa_pos)
        self.kappa_pos = kappa_pos

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The curvature of InfoNCE, with 1/τ = κ κ_pos/2: d similarity / d cosine for close pairs and large κ."""
        return {"name": "infonce", "temperature": 2 / (self.kappa_pos * kappa)}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        first, second = ((pairs.positive != 0) | (pairs.negative != 0)).nonzero(as_tuple=True)
        similarity = log_expected_likelihood(mean[first], kappa[first], mean[second], kappa[second])
        logits = similarity.new_zeros(len(mean), len(mean)).index_put((first, second), self.kappa_pos * similarity)
        return mean_cross_entropy(logits, pairs)


def log_expected_likelihood(
    mean: Float[Tensor, "*#B D"],
    kappa: Float[Tensor, "*#B"],
    other_mean: Float[Tensor, "*#B D"],
    other_kappa: Float[Tensor, "*#B"],
) -> Float[Tensor, "*B"]:
    """log ∫ vMF(z; μ₁, κ₁) vMF(z; μ₂, κ₂) dz = log C(κ₁) + log C(κ₂) − log C(‖κ₁μ₁ + κ₂μ₂‖), computed in float64.

    C is the density's normaliser. With κ₃ = ‖κ₁μ₁ + κ₂μ₂‖ and L = log C + κ, the code computes
    L₁ + L₂ − L₃ − κ₁κ₂‖μ₁ − μ₂‖² / (κ₁ + κ₂ + κ₃), in which no large terms cancel.
    """
    dimension, dtype = mean.shape[-1], torch.promote_types(mean.dtype, kappa.dtype)
    first, second = kappa.double(), other_kappa.double()
    square = (mean.double() - other_mean.double()).square().sum(-1)
    total = ((first + second).square() - first * second * square).clamp(min=1e-12).sqrt()
    gap = first * second * square / (first + second + total)
    normalizers = [log_normalizer(dimension, k, scaled=True) for k in (first, second, total)]
    return (normalizers[0] + normalizers[1] - normalizers[2] - gap).to(dtype)


class HIB(DistributionLoss):
    """Mean of −log p(match) over positive pairs plus mean of −log(1 − p(match)) over negative pairs.

    p(match) = 1/S Σ_s sigmoid(a z_s·z'_s + b), with the s-th samples z_s and z'_s of the two items. lam leaves out the
    KL term of Oh et al. `lam.methods.Hib` is the original, on Gaussians and distances.

    Source: Kirchhof, Kasneci and Oh (2023), equation 54, after Oh et al. (2019); a = 1 and b = 0 are the best values in
    table 7.

    Args:
        n_samples: S ≥ 1.
        scale: a > 0.
        offset: b.
        n_negatives: random negatives of each item, at least 1; None for all in the batch.

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.full((2,), torch.inf)
        >>> round(float(HIB()(mean, kappa, Pairs.by_label(torch.tensor([0, 0])))), 3)
        0.313
    """

    def __init__(
        self, n_samples: int = 16, scale: float = 1.0, offset: float = 0.0, n_negatives: int | None = None
    ) -> None:
        super().__init__()
        check_at_least("n_samples", n_samples, 1)
        check_at_least("n_negatives", n_negatives, 1)
        check_positive("scale", scale)
        if not math.isfinite(offset):
            raise ValueError(f"offset must be finite, got {offset}")
        self.n_samples, self.scale, self.offset, self.n_negatives = n_samples, scale, offset, n_negatives

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The positive part of InfoNCE's second derivative; 1/τ is d logit / d cosine of the means in p(match)."""
        slope = self.scale * float(bessel_ratio(dimension, torch.tensor(kappa).double())) ** 2
        return {"name": "infonce", "temperature": 1 / slope, "split": "outputs", "fix": "projected"}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        samples = samples_of(mean, kappa, self.n_samples, generator)
        cosines = samples @ samples.transpose(1, 2)
        kinds = pairs.positive, drawn_negatives(pairs, self.n_negatives, generator).negative
        terms = []
        for kind, sign in zip(kinds, (1, -1), strict=True):
            first, second = kind.nonzero(as_tuple=True)
            log_matches = F.logsigmoid(sign * (self.scale * cosines[:, first, second] + self.offset))
            terms.append(weighted_mean(log_matches.logsumexp(0) - math.log(self.n_samples), kind[first, second]))
        return -terms[0] - terms[1]


def soft_contrastive(
    samples: Float[Tensor, "S N D"], pairs: Pairs, *, scale: Float[Tensor, ""], offset: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Minus the log probability that positive pairs match and negative pairs do not.

    With the samples z₁ˢ and z₂ᵗ of two items, p(match) = 1/S² Σ_st sigmoid(b − a ‖z₁ˢ − z₂ᵗ‖). The loss is the mean of
    −log p over positive pairs plus the mean of −log(1 − p) over negative pairs. There are two means, because Oh et al.
    draw equally many pairs of each kind. Without pairs, the loss is zero.

    Source: Oh et al. (2019), "Modeling uncertainty with hedged instance embedding", section 2.

    Example:
        >>> samples, one = torch.tensor([[[0.0], [1.0]]]), torch.tensor(1.0)
        >>> soft_contrastive(samples, Pairs.by_label(torch.tensor([7, 7])), scale=one, offset=one)
        tensor(0.6931)
    """
    n_samples, n_items, dimension = samples.shape
    pairs.check_size(n_items)
    flat = samples.transpose(0, 1).reshape(n_items * n_samples, dimension)
    # Not by ‖x‖² + ‖y‖² − 2xy: its root has no gradient at 0 and loses half of the digits.
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    blocks = distance.view(n_items, n_samples, n_items, n_samples).transpose(1, 2)

    def mean_log_probability(kind: Tensor, sign: int) -> Tensor:
        first, second = kind.triu().nonzero(as_tuple=True)  # the pairs are symmetric, and so is the probability
        log_matches = F.logsigmoid(sign * (offset - scale * blocks[first, second]))  # 1 − sigmoid(x) = sigmoid(−x)
        log_probability = log_matches.flatten(1).logsumexp(1) - 2 * math.log(n_samples)
        return weighted_mean(log_probability, kind[first, second])

    return -mean_log_probability(pairs.positive, 1) - mean_log_probability(pairs.negative, -1)


def mutual_likelihood(
    mean: Float[Tensor, "N D"], log_variance: Float[Tensor, "N D"], pairs: Pairs
) -> Float[Tensor, ""]:
    """Minus the mean log likelihood that the two embeddings of a positive pair are the same point.

    For a pair, −log ∫ N(z; μ₁, σ₁²) N(z; μ₂, σ₂²) dz is ½ Σ_d [(μ₁ − μ₂)² / (σ₁² + σ₂²) + log(σ₁² + σ₂²)], without the
    constant ½ D log 2π. Without positive pairs, the loss is zero.

    Source: Shi and Jain (2019), "Probabilistic face embeddings", section 3.2.

    Example:
        >>> mean, log_variance = torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1)
        >>> mutual_likelihood(mean, log_variance, Pairs.by_label(torch.tensor([7, 7])))
        tensor(1.3466)
    """
    if mean.shape != log_variance.shape:
        raise ValueError(
            f"mean and log_variance must have one shape, got {tuple(mean.shape)} and {tuple(log_variance.shape)}"
        )
    pairs.check_size(len(mean))
    first, second = pairs.positive.triu().nonzero(as_tuple=True)  # the pairs are symmetric, and so is the score
    log_sum = torch.logaddexp(log_variance[first], log_variance[second])
    scaled = (mean[first] - mean[second]) * (-log_sum / 2).exp()
    score = (scaled.square() + log_sum).sum(1) / 2
    return weighted_mean(score, pairs.positive[first, second])
