"""Tests whether losses between distributions recover the posteriors of a known generative process.

Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric uncertainty
of ambiguous inputs", section 5.1 and appendix B.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.experiments.base import SECONDS, Experiment, Outcome, Plot, Progress, check_choices
from lam.experiments.networks import layers
from lam.losses import ELK, HIB, DistributionLoss, MCInfoNCE
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.uncertainty import rank_correlation
from lam.utils.checks import check_at_least, check_choice, check_positive
from lam.vmf.bessel import bessel_ratio_complement
from lam.vmf.distribution import VonMisesFisher

LossOfPosteriors = Literal["mc_infonce", "elk", "hib", "infonce"]
Family = Literal["vmf", "gaussian", "laplace"]

_PROBES = 1000  # inputs that set a network's range of κ
_CANDIDATES = {"cpu": 1 << 11, "cuda": 1 << 16}  # candidates for positives at a time
_AHEAD = 16  # batches for which positives are drawn together
_WIDTHS = 10, 50, 50, 50, 50, 50, 10  # hidden layers of the learning networks, in multiples of D
_NEAR = 0.5  # radians between most latents and their means
_STRAIGHTENING = 64, 1e-2  # inputs of a batch, and the learning rate
_DRAWS = 256  # latents of each input that measure a spread without a closed form
_DRAWN = 5  # posteriors in the picture
_START = 16.0, 32.0  # κ̂ before training where κ is infinite


@dataclass(frozen=True, kw_only=True)
class PosteriorRecovery(Experiment):
    """Each loss trains networks μ̂(x) and κ̂(x) to estimate a process's posteriors vMF(μ(x), κ(x)) from pairs of inputs.

    Inputs x are uniform in the unit cube, and random networks give the true μ and κ. Let z and z⁺ be random latents of
    two inputs. The second input becomes a positive of the first with probability e^(κ_pos (z·z⁺ − 1)); negatives are
    random inputs. So MCInfoNCE with many samples and negatives is minimal at the truth. κ̂ starts in the range of κ.
    MCInfoNCE learns μ̂ in the first half of the batches and κ̂ in the second, the best order in the paper; other losses
    learn both at once. Losses do not determine the rotation of latents, so cosines of pairs are compared.

    The losses assume von Mises-Fisher distributions. In a process of another `posterior`, a latent is the unit vector
    along μ(x) plus noise in each coordinate: normal with variance 1/κ(x), or Laplace with scale 1/κ(x). This κ is not
    comparable with κ̂, so the table also has the spread, the mean of 1 − z·μ. With an infinite κ, z is μ(x). `infonce`
    learns only directions.

    The authors accept positives with probability e^(κ_pos z·z⁺) C(κ_pos) / (e^(κ_pos z·z⁺) C(κ_pos) + C(0)), where C is
    the density's normaliser. For close latents, this probability is flat: with random negatives, κ̂ is half of κ and
    misorders items.

    Attributes:
        dimension: D of inputs and latents.
        encoder_dimension: D of the learned latents; by default the same.
        ambiguity: the least and the greatest κ(x), or infinity (`.inf`) for both.
        posterior: family of the process's posteriors.
        shared: whether the network of κ takes the output of the network of μ, in the process and in the encoder.
        losses: losses to compare.
        n_batches: number of training batches for each loss.
        batch_size: positive pairs in a batch.
        n_negatives: number of negatives in a batch, for all anchors; with few, the truth is not the loss's minimum.
        straightening: training steps that make angles of μ(x) proportional to distances of inputs; a random μ is often
            discontinuous inside the cube, or nearly constant.
        n_samples: number of samples of MCInfoNCE and HIB.
        kappa_pos: κ_pos of the process and of the losses.
        learning_rate: initial learning rate, with cosine decay, of each phase. For D = 10 use the paper's 1e-4: with
            1e-3, long training moves μ̂ and κ̂ away from the truth again.
        n_test: number of test inputs for κ̂; μ̂ is compared on pairs of at most 2,000 of these inputs.
    """

    dimension: int = 2
    encoder_dimension: int | None = None
    ambiguity: tuple[float, float] = (16.0, 32.0)
    posterior: Family = "vmf"
    shared: bool = False
    losses: tuple[LossOfPosteriors, ...] = ("mc_infonce", "elk", "hib")
    n_batches: int = 4096
    batch_size: int = 256
    n_negatives: int = 256
    straightening: int = 1000
    n_samples: int = 16
    kappa_pos: float = 20.0
    learning_rate: float = 1e-3
    n_test: int = 10_000

    name = "posterior-recovery"
    title = "Are the posteriors of a known process recovered?"

    def __post_init__(self) -> None:
        for name in ("dimension", "n_batches", "batch_size", "n_negatives"):
            check_at_least(name, getattr(self, name), 2)
        for name, least in (("straightening", 0), ("n_samples", 1), ("n_test", 10), ("encoder_dimension", 2)):
            check_at_least(name, getattr(self, name), least)
        check_positive("kappa_pos", self.kappa_pos)
        check_positive("learning_rate", self.learning_rate)
        low, high = self.ambiguity
        if not self.injective and not 1 < low < high < math.inf:
            raise ValueError(
                f"ambiguity must be two concentrations, 1 < least < largest, or twice .inf, got {low} and {high}"
            )
        check_choice("posterior", self.posterior, get_args(Family))
        check_choices("losses", self.losses, get_args(LossOfPosteriors))

    @property
    def injective(self) -> bool:
        """Whether each input has a single latent (κ is infinite)."""
        return self.ambiguity == (math.inf, math.inf)

    @property
    def learned_dimension(self) -> int:
        """D of the learned latents."""
        return self.encoder_dimension or self.dimension

    def run(self, progress: Progress) -> Outcome:
        """Run the experiment: a table row for each loss, a plot of κ̂ over κ, and five posteriors if D = 2."""
        process = Process(self)
        test = uniform_in_cube(self.n_test, self.dimension, self.generator("test"))
        rows, clouds, plots = [], {}, {}
        for name in self.losses:
            start = time.process_time()
            learned = self.learn(name, process, progress)
            seconds = time.process_time() - start
            values, few = compared(process, learned, test), test[:2000]
            if name == "infonce":
                values |= {column: None for column in values if "μ" not in column}
            rows.append({"loss": name, **values, SECONDS: seconds})
            if name == "infonce" or self.injective:
                continue
            clouds[name] = list(zip(process.kappa(few).tolist(), learned.kappa(few).tolist(), strict=True))
            if self.dimension == self.learned_dimension == 2 and self.posterior == "vmf":
                plots[f"Five posteriors of the process, and as {name} learned them"] = drawn(process, learned, few)
        notes = [f"κ of the process lies in {self.ambiguity[0]:g} to {self.ambiguity[1]:g}, D = {self.dimension}."]
        if clouds:
            plots = {"κ̂ over κ, one point for each input": Plot("κ", "κ̂", clouds), **plots}
        return Outcome(rows, plots, notes)

    def learn(self, name: LossOfPosteriors, process: "Process", progress: Progress) -> "Posteriors":
        """Train μ̂ and κ̂ with one loss."""
        widths = [factor * self.dimension for factor in _WIDTHS]
        sizes = self.dimension, self.learned_dimension
        learned = Posteriors(*sizes, widths, widths, self.generator("encoder"), shared=self.shared)
        learned.match_range(*(_START if self.injective else self.ambiguity), self.generator("range"))
        losses: dict[LossOfPosteriors, DistributionLoss] = {
            "mc_infonce": MCInfoNCE(self.kappa_pos, self.n_samples),
            "elk": ELK(self.kappa_pos),
            "hib": HIB(self.n_samples),
            "infonce": MCInfoNCE(self.kappa_pos, n_samples=1),  # at an infinite κ̂, see below
        }
        generator = self.generator(name)
        loss = losses[name].to(generator.device)
        batches = process.batches(self.batch_size, self.n_negatives, self.generator("batches"))
        pairs = pairs_of_batch(self.batch_size, self.n_negatives, generator.device)
        half = self.n_batches // 2
        phases: list[tuple[nn.Module, int]] = [(learned, self.n_batches)]
        if name == "mc_infonce":
            phases = [(learned.of_mean, half), (learned.of_kappa, self.n_batches - half)]
        if name == "infonce":
            phases = [(learned.of_mean, self.n_batches)]
        done = 0
        for module, n_batches in phases:
            learned.requires_grad_(False)
            module.requires_grad_(True)
            optimizer = torch.optim.Adam(module.parameters(), self.learning_rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_batches)
            for _ in range(n_batches):
                inputs = next(batches)
                optimizer.zero_grad()
                kappa = torch.full_like(inputs[:, 0], math.inf) if name == "infonce" else learned.kappa(inputs)
                mean = learned.mean(inputs)
                if mean.isnan().any() or kappa.isnan().any():
                    raise ValueError(
                        f"{name} diverged at batch {done + 1}: lower learning_rate (now {self.learning_rate:g})"
                    )
                loss(mean, kappa, pairs, generator=generator).backward()
                optimizer.step()
                schedule.step()
                done += 1
                progress(name, done, self.n_batches)
        return learned.requires_grad_(False)


class Posteriors(nn.Module):
    """μ(x) and κ(x) = 1 + e^(slope r(x) + shift), where μ and r are networks with leaky ReLUs.

    `of_mean` and `of_kappa` are the widths of hidden layers for μ and r. If `shared`, r takes the output of μ's
    network, before normalisation, instead of the inputs.
    """

    def __init__(
        self,
        dimension: int,
        latent: int,
        of_mean: Sequence[int],
        of_kappa: Sequence[int],
        generator: torch.Generator,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.dimension, self.shared = dimension, shared
        self.of_mean = layers([dimension, *of_mean, latent], generator)
        self.of_kappa = layers([latent if shared else dimension, *of_kappa, 1], generator)
        self.register_buffer("slope", torch.ones((), device=generator.device))
        self.register_buffer("shift", torch.zeros((), device=generator.device))

    def mean(self, inputs: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        """μ(x), unit rows."""
        return F.normalize(self.of_mean(inputs), dim=1)

    def kappa(self, inputs: Float[Tensor, "N I"]) -> Float[Tensor, " N"]:
        """κ(x)."""
        raw = self.get_buffer("slope") * self._raw(inputs) + self.get_buffer("shift")
        return 1 + raw.clamp(max=18.0).exp()  # the losses clip κ near e¹⁸ anyway

    def _raw(self, inputs: Tensor) -> Tensor:
        return self.of_kappa(self.of_mean(inputs) if self.shared else inputs)[:, 0]

    def straighten(self, n_steps: int, generator: torch.Generator) -> None:
        """Train μ so that angles are proportional to distances of inputs, with π for opposite corners of the cube."""
        n_inputs, rate = _STRAIGHTENING
        optimizer = torch.optim.Adam(self.of_mean.parameters(), rate)
        for _ in range(n_steps):
            inputs = uniform_in_cube(n_inputs, self.dimension, generator)
            mean, angles = self.mean(inputs), torch.cdist(inputs, inputs) * math.pi / math.sqrt(self.dimension)
            optimizer.zero_grad()
            (mean @ mean.T - angles.cos()).square().mean().backward()
            optimizer.step()

    @torch.no_grad()
    def match_range(self, low: float, high: float, generator: torch.Generator) -> None:
        """Set `slope` and `shift` so that κ ranges from `low` to `high` on random inputs."""
        raw = self._raw(uniform_in_cube(_PROBES, self.dimension, generator))
        log_low, log_high = math.log(low - 1), math.log(high - 1)
        slope = (log_high - log_low) / (raw.max() - raw.min()).clamp(min=1e-6)
        self.get_buffer("slope").copy_(slope)
        self.get_buffer("shift").copy_(log_low - slope * raw.min())


class Process:
    """The generative process: random posteriors, and positive pairs by rejection sampling."""

    def __init__(self, settings: PosteriorRecovery) -> None:
        self.settings, self.dimension, self.kappa_pos = settings, settings.dimension, settings.kappa_pos
        generator, sizes = settings.generator("process"), (settings.dimension, settings.dimension)
        posteriors = Posteriors(*sizes, [10, 10], [10], generator, shared=settings.shared)
        posteriors.straighten(settings.straightening, generator)
        if not settings.injective:
            posteriors.match_range(*settings.ambiguity, generator)
        self.posteriors = posteriors.requires_grad_(False)
        self.mean = posteriors.mean

    def kappa(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ(x)."""
        return torch.full_like(inputs[:, 0], math.inf) if self.settings.injective else self.posteriors.kappa(inputs)

    def latents(self, inputs: Float[Tensor, "N D"], generator: torch.Generator) -> Float[Tensor, "N D"]:
        """A latent of each input."""
        mean, kappa = self.mean(inputs), self.kappa(inputs)
        if self.settings.injective:
            return mean
        if self.settings.posterior == "vmf":
            return VonMisesFisher(mean, kappa, validate_args=False).sample(generator=generator)
        if self.settings.posterior == "gaussian":
            noise = torch.randn(mean.shape, generator=generator, device=mean.device) / kappa.sqrt()[:, None]
        else:  # a Laplace variable is the difference of two exponential ones
            one, other = torch.empty(2, *mean.shape, device=mean.device).exponential_(generator=generator)
            noise = (one - other) / kappa[:, None]
        return F.normalize(mean + noise)

    def spread(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """Mean of 1 − z·μ(x) over the latents z of each input."""
        if self.settings.injective:
            return torch.zeros_like(inputs[:, 0])
        if self.settings.posterior == "vmf":
            return bessel_ratio_complement(self.dimension, self.kappa(inputs).double())
        generator, mean = self.settings.generator("spread"), self.mean(inputs)
        draws = ((1 - (self.latents(inputs, generator) * mean).sum(1)).double() for _ in range(_DRAWS))
        return torch.stack(list(draws)).mean(0)

    def batches(self, n_pairs: int, n_negatives: int, generator: torch.Generator) -> Iterator[Float[Tensor, "N D"]]:
        """Endless batches of inputs: anchors, their positives, then negatives."""
        while True:
            anchors, latents = self._draw(_AHEAD * n_pairs, generator)
            negatives = uniform_in_cube(_AHEAD * n_negatives, self.dimension, generator)
            parts = anchors, self.positives(latents, generator), negatives
            yield from torch.cat([part.unflatten(0, (_AHEAD, -1)) for part in parts], 1)

    def positives(self, latents: Float[Tensor, "N D"], generator: torch.Generator) -> Float[Tensor, "N D"]:
        """An input for each latent z, with density proportional to the mean of e^(κ_pos z·z⁺) over its latents z⁺."""
        inputs, pending = torch.empty_like(latents), torch.arange(len(latents), device=latents.device)
        while len(pending):
            candidates, others = self._draw(_CANDIDATES[latents.device.type], generator)
            log_odds = self.kappa_pos * (latents[pending] @ others.T - 1)
            uniforms = torch.rand(log_odds.shape, generator=generator, device=log_odds.device)
            best = (log_odds - uniforms.log()).max(1)  # accepted if positive; the best one is as good as any
            accepted = best.values > 0
            inputs[pending[accepted]] = candidates[best.indices[accepted]]
            pending = pending[~accepted]
        return inputs

    def _draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = uniform_in_cube(n, self.dimension, generator)
        return inputs, self.latents(inputs, generator)


def uniform_in_cube(n: int, dimension: int, generator: torch.Generator) -> Float[Tensor, "N D"]:
    """Uniform points in the unit cube, on the device of the generator."""
    return torch.rand(n, dimension, generator=generator, device=generator.device)


def pairs_of_batch(n_pairs: int, n_negatives: int, device: torch.device | str = "cpu") -> Pairs:
    """The pairs of a batch of `Process.batches`: an anchor with its positive, and with all negatives.

    Positives of other anchors do not count as negatives, because positives are not uniform.
    """
    n = 2 * n_pairs + n_negatives
    positive, negative = torch.zeros(2, n, n, dtype=torch.bool, device=device)
    anchors = torch.arange(n_pairs)
    positive[anchors, anchors + n_pairs] = True
    negative[:n_pairs, 2 * n_pairs :] = True
    return Pairs(positive, negative, n_pairs, n_pairs * n_negatives)


@torch.no_grad()
def compared(process: Process, learned: Posteriors, test: Float[Tensor, "N D"]) -> dict[str, float | None]:
    """RMSE and rank correlation of pair cosines, κ and spread; medians of κ̂, of κ̂/κ and of ratios of small angles.

    Some values are None (undefined) for an infinite κ.
    """
    few = test[:2000]
    upper = torch.ones(len(few), len(few), device=few.device).triu(1).bool()
    cosines = [(mean @ mean.T)[upper] for mean in (process.mean(few), learned.mean(few))]
    kappas = [process.kappa(test), learned.kappa(test)]
    dimension = process.settings.learned_dimension
    spreads = [process.spread(test), bessel_ratio_complement(dimension, kappas[1].double())]
    values: dict[str, float | None] = {}
    for what, (truth, estimate) in (("μ", cosines), ("κ", kappas), ("spread", spreads)):
        finite = bool(truth.isfinite().all())
        error = float((truth.double() - estimate.double()).square().mean().sqrt()) if finite else None
        values[f"RMSE of {what}"] = error
        values[f"rank correlation of {what}"] = rank_correlation(truth, estimate) if finite else None
    angles, learned_angles = (cosine.clamp(-1, 1).arccos() for cosine in cosines)
    near = (angles > 0) & (angles < _NEAR)
    values["median of κ̂"] = float(kappas[1].median())
    values["κ̂ over κ"] = None if process.settings.injective else float((kappas[1] / kappas[0]).median())
    ratio = learned_angles[near] / angles[near]
    values["angles of μ̂ over those of μ"] = float(ratio.median()) if len(ratio) else None
    return values


@torch.no_grad()
def drawn(process: Process, learned: Posteriors, inputs: Float[Tensor, "N 2"]) -> Plot:
    """Densities by angle: a few posteriors of the process, and the learned posteriors after rotation."""
    means = process.mean(inputs), learned.mean(inputs)
    left, _, right = torch.linalg.svd(means[1].T @ means[0])
    angle = torch.linspace(-math.pi, math.pi, 361, device=inputs.device)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, mean, kappas in (
        ("true", means[0], process.kappa(inputs)),
        ("learned", means[1] @ left @ right, learned.kappa(inputs)),
    ):
        posteriors = VonMisesFisher(mean[:_DRAWN], kappas[:_DRAWN], validate_args=False)
        densities = posteriors.log_prob(points[:, None]).exp().T
        for number, density in enumerate(densities, 1):
            curves[f"{number}, {name}"] = list(zip(angle.tolist(), density.tolist(), strict=True))
    return Plot("angle", "density", curves)
