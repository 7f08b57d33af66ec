"""Whether losses of distributions recover the posteriors of a known generative process.

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
from lam.retrieval.metrics.aleatoric import rank_correlation
from lam.utils.checks import check_at_least, check_positive
from lam.vmf.distribution import VonMisesFisher

LossOfPosteriors = Literal["mc_infonce", "elk", "hib"]

_PROBES = 1000  # inputs that set a network's range of κ
_CANDIDATES = {"cpu": 1 << 11, "cuda": 1 << 16}  # candidates for positives at a time
_AHEAD = 16  # batches for which positives are drawn together
_WIDTHS = 10, 50, 50, 50, 50, 50, 10  # hidden layers of the learning networks, in multiples of D
_NEAR = 0.5  # radians between most latents and their means
_STRAIGHTENING = 64, 1e-2  # inputs of a batch, and the learning rate


@dataclass(frozen=True, kw_only=True)
class PosteriorRecovery(Experiment):
    """Other networks learn the true random networks μ(x) and κ(x) from pairs only, by each loss.

    Inputs x are uniform in the unit cube, latents z ~ vMF(μ(x), κ(x)). An input with latent z⁺ becomes the positive of
    an anchor's latent z with probability e^(κ_pos (z·z⁺ − 1)); negatives are any inputs. So MCInfoNCE with many samples
    and negatives is minimal at the truth. κ̂ starts in the range of κ. MCInfoNCE learns μ̂ in the first half of the
    batches and κ̂ in the second, the best order in the source; the other losses learn both at once. The loss does not
    determine a rotation of the latents, so cosines of pairs are compared.

    The source accepts by e^(κ_pos z·z⁺) C(κ_pos) / (e^(κ_pos z·z⁺) C(κ_pos) + C(0)), which is flat for close latents:
    with any inputs as negatives, κ̂ is half of κ and loses its order.

    Attributes:
        dimension: D of inputs and latents.
        ambiguity: the least and the greatest κ(x).
        losses: losses to compare.
        n_batches: number of training batches for each loss.
        batch_size: positive pairs in a batch.
        n_negatives: further inputs in a batch, uniform in the cube, negatives of all anchors. With few, the loss is not
            minimal at the truth.
        straightening: training steps that make angles of μ(x) proportional to distances of inputs. A random network is
            often discontinuous inside the cube, or nearly constant.
        n_samples: number of samples of MCInfoNCE and HIB.
        kappa_pos: κ_pos of the process and of the losses.
        learning_rate: initial learning rate of each phase; it decays by a cosine. For D = 10 use the source's 1e-4:
            with 1e-3, long training moves μ̂ and κ̂ away from the truth again.
        n_test: number of inputs that compare κ̂; pairs of at most 2,000 of them compare μ̂.
    """

    dimension: int = 2
    ambiguity: tuple[float, float] = (16.0, 32.0)
    losses: tuple[LossOfPosteriors, ...] = get_args(LossOfPosteriors)
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
        for name, least in (("straightening", 0), ("n_samples", 1), ("n_test", 10)):
            check_at_least(name, getattr(self, name), least)
        check_positive("kappa_pos", self.kappa_pos)
        check_positive("learning_rate", self.learning_rate)
        low, high = self.ambiguity
        if not 1 < low < high < math.inf:
            raise ValueError(f"ambiguity must be two concentrations, 1 < least < largest, got {low} and {high}")
        check_choices("losses", self.losses, get_args(LossOfPosteriors))

    def run(self, progress: Progress) -> Outcome:
        """Run the experiment: a table row for each loss, and a plot of κ̂ over κ."""
        process = Process(self)
        test = uniform(self.n_test, self.dimension, self.generator("test"))
        rows, clouds = [], {}
        for name in self.losses:
            start = time.process_time()
            learned = self.learn(name, process, progress)
            seconds = time.process_time() - start
            rows.append({"loss": name, **compared(process, learned, test), SECONDS: seconds})
            few = test[:2000]
            clouds[name] = list(zip(process.kappa(few).tolist(), learned.kappa(few).tolist(), strict=True))
        notes = [f"κ of the process lies in {self.ambiguity[0]:g} to {self.ambiguity[1]:g}, D = {self.dimension}."]
        return Outcome(rows, {"κ̂ over κ, an input a point": Plot("κ", "κ̂", clouds)}, notes)

    def learn(self, name: LossOfPosteriors, process: "Process", progress: Progress) -> "Posteriors":
        """Train μ̂ and κ̂ by one loss."""
        widths = [factor * self.dimension for factor in _WIDTHS]
        learned = Posteriors(self.dimension, widths, widths, self.generator("encoder"))
        learned.match_range(*self.ambiguity, self.generator("range"))
        losses: dict[LossOfPosteriors, DistributionLoss] = {
            "mc_infonce": MCInfoNCE(self.kappa_pos, self.n_samples),
            "elk": ELK(self.kappa_pos),
            "hib": HIB(self.n_samples),
        }
        generator = self.generator(name)
        loss = losses[name].to(generator.device)
        batches = process.batches(self.batch_size, self.n_negatives, self.generator("batches"))
        pairs = pairs_of_batch(self.batch_size, self.n_negatives, generator.device)
        half = self.n_batches // 2
        phases: list[tuple[nn.Module, int]] = [(learned, self.n_batches)]
        if name == "mc_infonce":
            phases = [(learned.of_mean, half), (learned.of_kappa, self.n_batches - half)]
        done = 0
        for module, n_batches in phases:
            learned.requires_grad_(False)
            module.requires_grad_(True)
            optimizer = torch.optim.Adam(module.parameters(), self.learning_rate)
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
    """μ(x) and κ(x) = 1 + e^(a r(x) + b), each with a network of linear layers and leaky ReLUs.

    Args:
        dimension: D of inputs and latents.
        of_mean: widths of the hidden layers for μ.
        of_kappa: widths of the hidden layers for κ.
        generator: draws the weights.
    """

    def __init__(
        self, dimension: int, of_mean: Sequence[int], of_kappa: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.dimension = dimension
        self.of_mean = layers([dimension, *of_mean, dimension], generator)
        self.of_kappa = layers([dimension, *of_kappa, 1], generator)
        self.register_buffer("slope", torch.ones((), device=generator.device))
        self.register_buffer("shift", torch.zeros((), device=generator.device))

    def mean(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """μ(x), unit rows."""
        return F.normalize(self.of_mean(inputs), dim=1)

    def kappa(self, inputs: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """κ(x)."""
        raw = self.get_buffer("slope") * self.of_kappa(inputs)[:, 0] + self.get_buffer("shift")
        return 1 + raw.clamp(max=18.0).exp()  # the losses clip κ near e¹⁸ anyway

    def straighten(self, n_steps: int, generator: torch.Generator) -> None:
        """Train μ to angles proportional to distances of inputs, π between opposite corners of the cube."""
        n_inputs, rate = _STRAIGHTENING
        optimizer = torch.optim.Adam(self.of_mean.parameters(), rate)
        for _ in range(n_steps):
            inputs = uniform(n_inputs, self.dimension, generator)
            mean, angles = self.mean(inputs), torch.cdist(inputs, inputs) * math.pi / math.sqrt(self.dimension)
            optimizer.zero_grad()
            (mean @ mean.T - angles.cos()).square().mean().backward()
            optimizer.step()

    @torch.no_grad()
    def match_range(self, low: float, high: float, generator: torch.Generator) -> None:
        """Set a and b so that κ ranges from `low` to `high` on random inputs."""
        raw = self.of_kappa(uniform(_PROBES, self.dimension, generator))
        log_low, log_high = math.log(low - 1), math.log(high - 1)
        slope = (log_high - log_low) / (raw.max() - raw.min()).clamp(min=1e-6)
        self.get_buffer("slope").copy_(slope)
        self.get_buffer("shift").copy_(log_low - slope * raw.min())


class Process:
    """The generative process: random posteriors, and positive pairs by rejection.

    Args:
        settings: its dimension, range of κ, κ_pos and steps of straightening are used.
    """

    def __init__(self, settings: PosteriorRecovery) -> None:
        self.dimension, self.kappa_pos = settings.dimension, settings.kappa_pos
        generator = settings.generator("process")
        posteriors = Posteriors(self.dimension, [10, 10], [10], generator)
        posteriors.straighten(settings.straightening, generator)
        posteriors.match_range(*settings.ambiguity, generator)
        self.posteriors = posteriors.requires_grad_(False)
        self.mean, self.kappa = posteriors.mean, posteriors.kappa

    def batches(self, n_pairs: int, n_negatives: int, generator: torch.Generator) -> Iterator[Float[Tensor, "N D"]]:
        """Endless batches of inputs: anchors, their positives, then negatives; several batches are drawn together."""
        while True:
            anchors, latents = self._draw(_AHEAD * n_pairs, generator)
            negatives = uniform(_AHEAD * n_negatives, self.dimension, generator)
            parts = anchors, self.positives(latents, generator), negatives
            yield from torch.cat([part.unflatten(0, (_AHEAD, -1)) for part in parts], 1)

    def positives(self, latents: Float[Tensor, "N D"], generator: torch.Generator) -> Float[Tensor, "N D"]:
        """An input for each latent z, with density proportional to E e^(κ_pos z·z⁺) over the input's latents z⁺."""
        inputs, pending = torch.empty_like(latents), torch.arange(len(latents), device=latents.device)
        while len(pending):
            candidates, others = self._draw(_CANDIDATES[latents.device.type], generator)
            log_odds = self.kappa_pos * (latents[pending] @ others.T - 1)
            uniforms = torch.rand(log_odds.shape, generator=generator, device=log_odds.device)
            best = (log_odds - uniforms.log()).max(1)  # positive values are accepted; any of them will do
            accepted = best.values > 0
            inputs[pending[accepted]] = candidates[best.indices[accepted]]
            pending = pending[~accepted]
        return inputs

    def _draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = uniform(n, self.dimension, generator)
        posteriors = VonMisesFisher(self.mean(inputs), self.kappa(inputs), validate_args=False)
        return inputs, posteriors.sample(generator=generator)


def uniform(n: int, dimension: int, generator: torch.Generator) -> Float[Tensor, "N D"]:
    """Points uniform in the unit cube, on the device of the generator."""
    return torch.rand(n, dimension, generator=generator, device=generator.device)


def pairs_of_batch(n_pairs: int, n_negatives: int, device: torch.device | str = "cpu") -> Pairs:
    """The pairs of a batch of `Process.batches`: an anchor has its positive and all negatives.

    Positives of other anchors are no negatives, because positives are not uniform.
    """
    n = 2 * n_pairs + n_negatives
    positive, negative = torch.zeros(2, n, n, dtype=torch.bool, device=device)
    anchors = torch.arange(n_pairs)
    positive[anchors, anchors + n_pairs] = True
    negative[:n_pairs, 2 * n_pairs :] = True
    return Pairs(positive, negative, n_pairs, n_pairs * n_negatives)


@torch.no_grad()
def compared(process: Process, learned: Posteriors, test: Float[Tensor, "N D"]) -> dict[str, float | None]:
    """RMSE and rank correlation of pair cosines and of κ; median ratios of κ and of small angles."""
    few = test[:2000]
    upper = torch.ones(len(few), len(few), device=few.device).triu(1).bool()
    cosines = [(mean @ mean.T)[upper] for mean in (process.mean(few), learned.mean(few))]
    kappas = [process.kappa(test), learned.kappa(test)]
    values: dict[str, float | None] = {}
    for what, (truth, estimate) in (("μ", cosines), ("κ", kappas)):
        values[f"RMSE of {what}"] = float((truth.double() - estimate.double()).square().mean().sqrt())
        values[f"rank correlation of {what}"] = rank_correlation(truth, estimate)
    angles, learned_angles = (cosine.clamp(-1, 1).arccos() for cosine in cosines)
    near = (angles > 0) & (angles < _NEAR)
    values["κ̂ over κ"] = float((kappas[1] / kappas[0]).median())
    ratio = learned_angles[near] / angles[near]
    values["angles of μ̂ over those of μ"] = float(ratio.median()) if len(ratio) else None
    return values
