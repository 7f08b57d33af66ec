"""Whether losses of distributions recover the posteriors of a generative process that is known.

Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric uncertainty
of ambiguous inputs", section 5.1 and appendix B.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.experiments.base import Experiment, Outcome, Progress
from lam.experiments.networks import layers
from lam.losses import ELK, HIB, DistributionLoss, MCInfoNCE
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.aleatoric import rank_correlation
from lam.utils.checks import check_at_least, check_choice, check_positive
from lam.vmf.bessel import log_normalizer
from lam.vmf.distribution import VonMisesFisher

LossOfPosteriors = Literal["mc_infonce", "elk", "hib"]

_PROBES = 1000  # inputs by which a network is found not to be collapsed, and its range of κ is set
_CANDIDATES = 512  # a side of the table of pairs from which positive ones are accepted
_ATTEMPTS = 1000
_LARGEST_COSINE = 0.5  # of the least alike pair of probes


@dataclass(frozen=True, kw_only=True)
class PosteriorRecovery(Experiment):
    """Random networks μ(x) and κ(x) are the truth; others learn it from pairs alone, by each loss.

    Inputs x are uniform in the unit cube, latents z ~ vMF(μ(x), κ(x)), and a pair of inputs is positive with the
    probability C(κ_pos) e^(κ_pos z·z⁺) / (C(κ_pos) e^(κ_pos z·z⁺) + C(0)). Negatives are uniform in the cube.
    κ̂ begins with the range of κ. MCInfoNCE learns μ̂ in the first half of the batches and κ̂ in the second, as the source
    found best; the others learn both at once. Latents are known up to a rotation, so cosines of pairs are compared.

    Attributes:
        dimension: D of inputs and latents.
        ambiguity: the least and the largest κ(x).
        losses: which are compared.
        n_batches: of the training by each loss.
        batch_size: positive pairs of a batch.
        n_negatives: further inputs of a batch, uniform in the cube, which are the negatives of all anchors.
        spread: what is normalised to μ(x) has mean 0 and unit covariance, as the theory has latents that are uniform on
            the sphere; without it, as in the source, only a collapse is ruled out, and all may lie on one side.
        n_samples: of MCInfoNCE and HIB.
        kappa_pos: of the process and of the losses.
        learning_rate: at the beginning, of μ̂ and where both are learned at once; it falls by a cosine in each phase.
        learning_rate_of_kappa: of κ̂ alone: a larger one throws it where it has no gradient any more.
        n_test: inputs on which κ̂ is compared; μ̂ is on pairs of at most 2,000 of them.
    """

    dimension: int = 2
    ambiguity: tuple[float, float] = (16.0, 32.0)
    losses: tuple[LossOfPosteriors, ...] = get_args(LossOfPosteriors)
    n_batches: int = 2048
    batch_size: int = 256
    n_negatives: int = 32
    spread: bool = False
    n_samples: int = 4
    kappa_pos: float = 20.0
    learning_rate: float = 1e-3
    learning_rate_of_kappa: float = 1e-4
    n_test: int = 10_000

    name = "posterior-recovery"
    title = "Are the posteriors of a known process recovered?"

    def __post_init__(self) -> None:
        check_at_least("dimension", self.dimension, 2)
        for name in ("n_batches", "batch_size", "n_negatives"):
            check_at_least(name, getattr(self, name), 2)
        check_at_least("n_samples", self.n_samples, 1)
        check_at_least("n_test", self.n_test, 10)
        check_positive("kappa_pos", self.kappa_pos)
        check_positive("learning_rate", self.learning_rate)
        check_positive("learning_rate_of_kappa", self.learning_rate_of_kappa)
        low, high = self.ambiguity
        if not 1 < low < high < math.inf:
            raise ValueError(f"ambiguity must be two concentrations, 1 < least < largest, got {low} and {high}")
        if not self.losses:
            raise ValueError(f"losses must be at least one of {', '.join(get_args(LossOfPosteriors))}, got none")
        for loss in self.losses:
            check_choice("losses", loss, get_args(LossOfPosteriors))

    def run(self, progress: Progress) -> Outcome:
        """Carry it out: a row of the table for each loss, and how κ̂ lies over κ."""
        process = Process(self)
        test = torch.rand(self.n_test, self.dimension, generator=self.generator("test"))
        rows, clouds = [], {}
        for name in self.losses:
            learned = self.learn(name, process, progress)
            rows.append({"loss": name, **compared(process, learned, test)})
            points = torch.stack([process.kappa(test), learned.kappa(test)], 1)[:2000].tolist()
            clouds[name] = [(x, y) for x, y in points]
        notes = [f"κ of the process lies in {self.ambiguity[0]:g} to {self.ambiguity[1]:g}, D = {self.dimension}."]
        return Outcome(rows, {"κ̂ over κ, an input a point": clouds}, notes)

    def loss_of(self, name: LossOfPosteriors) -> DistributionLoss:
        """The loss of a name."""
        make: dict[LossOfPosteriors, Callable[[], DistributionLoss]] = {
            "mc_infonce": lambda: MCInfoNCE(self.kappa_pos, self.n_samples),
            "elk": lambda: ELK(self.kappa_pos),
            "hib": lambda: HIB(self.n_samples),
        }
        return make[name]()

    def learn(self, name: LossOfPosteriors, process: "Process", progress: Progress) -> "Posteriors":
        """Train μ̂ and κ̂ by one loss."""
        learned = Posteriors(encoder_widths(self.dimension), self.dimension, self.generator("encoder"))
        learned.match_range(*self.ambiguity, self.generator("range"))
        loss, generator = self.loss_of(name), self.generator(name)
        batches = process.batches(self.batch_size, self.n_negatives, self.generator("batches"))
        pairs = pairs_of_batch(self.batch_size, self.n_negatives)
        half = self.n_batches // 2
        phases: list[tuple[nn.Module, int, float]] = [(learned, self.n_batches, self.learning_rate)]
        if name == "mc_infonce":
            phases = [
                (learned.of_mean, half, self.learning_rate),
                (learned.of_kappa, self.n_batches - half, self.learning_rate_of_kappa),
            ]
        done = 0
        for module, n_batches, rate in phases:
            learned.requires_grad_(False)
            module.requires_grad_(True)
            optimizer = torch.optim.Adam(module.parameters(), rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_batches)
            for _ in range(n_batches):
                inputs = next(batches)
                optimizer.zero_grad()
                loss(learned.mean(inputs), learned.kappa(inputs), pairs, generator=generator).backward()
                optimizer.step()
                schedule.step()
                done += 1
                progress(name, done, self.n_batches)
        return learned.requires_grad_(False)


class Posteriors(nn.Module):
    """μ(x) and κ(x) = 1 + e^(a r(x) + b), each by a network of linear layers and leaky ReLUs of its own.

    Args:
        widths: of the hidden layers of μ; κ has those, or `widths_of_kappa`.
        dimension: D of inputs and latents.
        generator: of the weights.
        widths_of_kappa: of the hidden layers of κ.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dimension: int,
        generator: torch.Generator,
        widths_of_kappa: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        widths_of_kappa = widths if widths_of_kappa is None else widths_of_kappa
        self.dimension = dimension
        self.of_mean = layers([dimension, *widths, dimension], generator)
        self.of_kappa = layers([dimension, *widths_of_kappa, 1], generator)
        self.register_buffer("slope", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))

    def mean(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """μ(x), unit rows."""
        return F.normalize(self.of_mean(inputs), dim=1)

    def kappa(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ(x)."""
        raw = self.get_buffer("slope") * self.of_kappa(inputs)[:, 0] + self.get_buffer("shift")
        return 1 + raw.clamp(max=18.0).exp()  # beyond e¹⁸ the losses cut κ anyway

    @torch.no_grad()
    def spread(self, generator: torch.Generator) -> None:
        """Shift and turn the last layer of μ so that its outputs on probes have mean 0 and unit covariance."""
        last: nn.Linear = self.of_mean[-1]  # pyright: ignore [reportAssignmentType]
        raw = self.of_mean(torch.rand(_PROBES, self.dimension, generator=generator))
        values, vectors = torch.linalg.eigh(raw.T.cov())
        whitening = (vectors / values.clamp(min=1e-6).sqrt()) @ vectors.T
        last.weight.copy_(whitening @ last.weight)
        last.bias.copy_(whitening @ (last.bias - raw.mean(0)))

    @torch.no_grad()
    def match_range(self, low: float, high: float, generator: torch.Generator) -> None:
        """Set a and b so that κ reaches from `low` to `high` on probes."""
        raw = self.of_kappa(torch.rand(_PROBES, self.dimension, generator=generator))
        log_low, log_high = math.log(low - 1), math.log(high - 1)
        slope = (log_high - log_low) / (raw.max() - raw.min()).clamp(min=1e-6)
        self.get_buffer("slope").copy_(slope)
        self.get_buffer("shift").copy_(log_low - slope * raw.min())


class Process:
    """The generative process: random posteriors, and positive pairs by rejection.

    Args:
        settings: the dimension, the range of κ and κ_pos.
    """

    def __init__(self, settings: PosteriorRecovery) -> None:
        self.dimension, self.kappa_pos = settings.dimension, settings.kappa_pos
        for attempt in range(_ATTEMPTS):
            generator = settings.generator("process", str(attempt))
            self.posteriors = Posteriors([10, 10], self.dimension, generator, [10]).requires_grad_(False)
            if settings.spread:
                self.posteriors.spread(generator)
            probes = self.posteriors.mean(torch.rand(_PROBES, self.dimension, generator=generator))
            if (probes @ probes.T).min() <= _LARGEST_COSINE:
                break
        else:
            raise ValueError(f"no network of {_ATTEMPTS} spreads its directions: take another seed, or spread=true")
        self.posteriors.match_range(*settings.ambiguity, generator)
        self.mean, self.kappa = self.posteriors.mean, self.posteriors.kappa

    @torch.no_grad()
    def batches(self, n_pairs: int, n_negatives: int, generator: torch.Generator) -> Iterator[Float[Tensor, "N D"]]:
        """Inputs without end: the first and the second of positive pairs, then negatives."""
        log_odds = log_normalizer(self.dimension, torch.tensor([self.kappa_pos, 0.0]))
        odds = float(log_odds[0] - log_odds[1])
        firsts = seconds = torch.empty(0, self.dimension)
        while True:
            while len(firsts) < n_pairs:
                first, second = self._accepted(odds, generator)
                firsts, seconds = torch.cat([firsts, first]), torch.cat([seconds, second])
            negatives = torch.rand(n_negatives, self.dimension, generator=generator)
            yield torch.cat([firsts[:n_pairs], seconds[:n_pairs], negatives])
            firsts, seconds = firsts[n_pairs:], seconds[n_pairs:]

    def _accepted(self, odds: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Some of the positive pairs of one table of candidates."""
        inputs = torch.rand(2 * _CANDIDATES, self.dimension, generator=generator)
        posteriors = VonMisesFisher(self.mean(inputs), self.kappa(inputs), validate_args=False)
        latents = posteriors.sample(generator=generator)
        cosines = latents[:_CANDIDATES] @ latents[_CANDIDATES:].T
        accepted = torch.rand(cosines.shape, generator=generator) < torch.sigmoid(self.kappa_pos * cosines + odds)
        first, second = accepted.nonzero(as_tuple=True)
        chosen = torch.randint(len(first), (min(len(first), _CANDIDATES),), generator=generator)
        return inputs[first[chosen]], inputs[_CANDIDATES + second[chosen]]


def pairs_of_batch(n_pairs: int, n_negatives: int) -> Pairs:
    """The pairs of such a batch: an anchor's positive is its partner, its negatives are those drawn apart alone.

    Other pairs are no negatives: what was accepted is not uniform.
    """
    n = 2 * n_pairs + n_negatives
    positive, negative = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    anchors = torch.arange(2 * n_pairs)
    positive[anchors, anchors.roll(n_pairs)] = True
    negative[: 2 * n_pairs, 2 * n_pairs :] = True
    return Pairs(positive, negative, 2 * n_pairs, 2 * n_pairs * n_negatives)


def encoder_widths(dimension: int) -> list[int]:
    """Of the hidden layers of the networks that learn, in multiples of D."""
    return [10 * dimension, *[50 * dimension] * 5, 10 * dimension]


@torch.no_grad()
def compared(process: Process, learned: Posteriors, test: Float[Tensor, "N D"]) -> dict[str, float | None]:
    """Root mean square error and rank correlation of the cosines of pairs, and of κ."""
    few = test[:2000]
    upper = torch.ones(len(few), len(few)).triu(1).bool()
    cosines = [(mean @ mean.T)[upper] for mean in (process.mean(few), learned.mean(few))]
    kappas = [process.kappa(test), learned.kappa(test)]
    values: dict[str, float | None] = {}
    for what, (truth, estimate) in (("μ", cosines), ("κ", kappas)):
        values[f"RMSE of {what}"] = float((truth.double() - estimate.double()).square().mean().sqrt())
        values[f"rank correlation of {what}"] = rank_correlation(truth, estimate)
    return values
