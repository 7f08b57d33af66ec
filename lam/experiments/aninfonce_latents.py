"""Tests whether losses recover latents that vary more in some dimensions than in others within a positive pair.

Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice", section 4.1, appendices F and
I.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lam import datasets
from lam.datasets import Splits
from lam.experiments.base import SECONDS, Experiment, Outcome, Plot, Progress, Row, check_choices
from lam.experiments.images import pixels_of
from lam.experiments.networks import layers, trained_decoder
from lam.losses import AnInfoNCE, InfoNCE
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.probing import knn_accuracy, linear_probe
from lam.utils.checks import check_at_least, check_positive
from lam.vmf.distribution import VonMisesFisher

LossOfLatents = Literal["aninfonce", "infonce", "ensemble"]
ImagesName = Literal["digits", "mnist", "fashionmnist"]

_LEAST: dict[str, float] = {
    **{"dimension": 2, "n_batches": 2, "batch_size": 2, "width": 1, "vae_epochs": 1, "n_test": 100},
    **{"n_hard": 0, "hard_from": 0, "drift": 0.0},
}
_NEIGHBOURS = 5
_SHELL = 0.02  # greatest distance from the sphere at which a draw counts as on the sphere
_TRIES = 10_000  # greatest number of times that 32 points are drawn for each anchor


@dataclass(frozen=True, kw_only=True)
class AnInfoNCELatents(Experiment):
    """An encoder learns latents z on the sphere from pairs of observations g(z), where g is an invertible network.

    Anchors z are uniform on the sphere. The positive z⁺ of z has the density e^(−Σ_d Λ_d (z⁺_d − z_d)²) on the sphere.
    Λ_d is `style` in the first half of the dimensions and `content` in the second. Negatives are the other anchors.
    Near negatives may be added from the start or later; their density has Λ⁻ in place of every Λ_d. With only near
    negatives, AnInfoNCE weights dimension d by the learned Λ_d minus the given Λ⁻. R² is the fit of a linear regression
    of z on the encoder's outputs. Learned and true Λ are compared after sorting.

    With `images`, the observation is an image: a variational autoencoder learns from this data set, and its decoder
    renders z. "k-NN" is the accuracy of five neighbours on the real test images, by the encoder's outputs.

    With `drift`, training anchors lie around one pole, and test anchors around the opposite pole. "told apart" is the
    accuracy of a linear classifier that distinguishes the two kinds of anchors; 0.5 is chance.

    With two ways to make pairs, the second way swaps style and content. The loss `ensemble` has a Λ for each way; the
    other losses treat all pairs alike.

    Source: corollary B.1 for near negatives; appendix I.3 adds three for each anchor in fine-tuning.

    Attributes:
        dimension: D of the latents, even.
        style: Λ of the style, in the first half of the dimensions.
        content: Λ of the content, in the second half.
        drift: κ of the von Mises-Fisher distribution of anchors; 0 for uniform anchors.
        graded: whether Λ_d changes evenly from `style` to `content` over the dimensions.
        images: data set for the autoencoder; None for observations g(z).
        root: folder of these images, if they need one.
        vae_epochs: epochs of the autoencoder.
        losses: losses to compare.
        temperature: temperature of InfoNCE, 1 in the authors' code; InfoNCE recovers the style at 0.5/`style`.
        initial: initial Λ of AnInfoNCE in all dimensions.
        ways: number of ways to make pairs, 1 or 2.
        n_hard: number of near negatives for each anchor.
        hard: Λ⁻ of near negatives.
        hard_from: number of batches before near negatives are added, below `n_batches`.
        others: whether the other anchors are negatives.
        normalise: whether the encoder's outputs are scaled to unit vectors.
        n_batches: number of training batches for each loss.
        batch_size: positive pairs of each way in a batch.
        width: width of the encoder's three hidden layers.
        learning_rate: initial learning rate, with cosine decay.
        n_test: number of points for fitting the regression, and number of other points for R².
    """

    dimension: int = 10
    style: float = 5.0
    content: float = 25.0
    drift: float = 0.0
    graded: bool = False
    images: ImagesName | None = None
    root: str | None = None
    vae_epochs: int = 50
    losses: tuple[LossOfLatents, ...] = ("aninfonce", "infonce")
    temperature: float = 1.0
    initial: float = 5.0
    ways: int = 1
    n_hard: int = 0
    hard: float = 2.0
    hard_from: int = 0
    others: bool = True
    normalise: bool = True
    n_batches: int = 6000
    batch_size: int = 256
    width: int = 200
    learning_rate: float = 2e-3
    n_test: int = 5000

    name = "aninfonce-latents"
    title = "Are anisotropic latents recovered?"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_at_least(name, getattr(self, name), least)
        for name in ("style", "content", "temperature", "initial", "hard", "learning_rate"):
            check_positive(name, getattr(self, name))
        if self.hard_from >= self.n_batches:
            raise ValueError(f"hard_from must be below n_batches, {self.n_batches}, got {self.hard_from}")
        if not self.others and (self.n_hard == 0 or self.hard_from > 0):
            raise ValueError("others=false leaves only near negatives: give n_hard, and hard_from=0")
        if not self.others and self.hard >= self.initial:
            raise ValueError(f"with others=false, hard must be below initial, {self.initial:g}, got {self.hard:g}")
        if self.ways not in (1, 2):
            raise ValueError(f"ways must be 1 or 2, got {self.ways}")
        if self.dimension % 2:
            raise ValueError(f"dimension must be even, half style and half content, got {self.dimension}")
        check_choices("losses", self.losses, get_args(LossOfLatents))

    @property
    def concentrations(self) -> Float[Tensor, "k D"]:
        """Λ of each way to make pairs; style comes first in the first way."""
        half = self.dimension // 2
        first = torch.tensor([self.style] * half + [self.content] * half)
        if self.graded:
            first = torch.linspace(self.style, self.content, self.dimension)
        return torch.stack([first, first.flip(0)])[: self.ways]

    def run(self, progress: Progress) -> Outcome:
        """Run the experiment: a table row for each loss, and curves over batches of R², the loss and the learned Λ."""
        generator, splits = self.generator("observation"), None
        if self.images is None:
            observe: nn.Module = observation(self.dimension, generator)
        else:
            splits = datasets.load(self.images, root=self.root)
            observe = trained_decoder(pixels_of(splits.train).flatten(1), self.dimension, self.vae_epochs, generator)
        rows: list[Row] = []
        plots: dict[str, dict[str, list[tuple[float, float]]]] = {}

        def record(title: str, curve: str, batch: int, value: float) -> None:
            plots.setdefault(title, {}).setdefault(curve, []).append((float(batch), value))

        for name in self.losses:
            start = time.process_time()
            row, encoder = self._learn(name, observe, record, progress)
            if splits is not None:
                row["k-NN"] = self._knn(encoder, splits)
            row["told apart"] = self._told_apart()
            rows.append({**row, SECONDS: time.process_time() - start})
        pictures = {f"{title} over batches": Plot("batches", title, curves) for title, curves in plots.items()}
        return Outcome(rows, pictures, [f"The true Λ is {self.concentrations.tolist()}."])

    def _learn(
        self, name: LossOfLatents, observe: nn.Module, record: Callable[..., None], progress: Progress
    ) -> tuple[dict[str, str | float | None], nn.Module]:
        D, generator = self.dimension, self.generator("encoder")
        n_inputs = observe(torch.zeros(1, D, device=generator.device)).shape[1]
        encoder = layers([n_inputs, *[self.width] * 3, D], generator)
        loss, truth = self._loss(name, generator.device), self._loss("ensemble", generator.device)
        if isinstance(truth, AnInfoNCE):
            truth.log_concentration.data = self.concentrations.log().to(generator.device)
        parameters = [*encoder.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
        optimizer = torch.optim.Adam(parameters, self.learning_rate)
        pairs: list[Pairs] = []
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.n_batches)
        batches = self.batches(self.generator("batches"))
        shares: dict[str, float] = {}
        every = max(1, self.n_batches // 20)
        for batch in range(1, self.n_batches + 1):
            if batch - 1 in (0, self.hard_from):
                pairs = self.pairs(self.n_hard if batch > self.hard_from else 0, generator.device)
            optimizer.zero_grad()
            z = next(batches)
            outputs = self._outputs(encoder, observe(z))
            if isinstance(loss, AnInfoNCE) and len(loss.concentration) == self.ways:
                value = loss.of_members(outputs, pairs)
            else:
                value = torch.stack([loss(outputs, of_way) for of_way in pairs]).sum()
            value.backward()
            optimizer.step()
            schedule.step()
            progress(name, batch, self.n_batches)
            if batch % every == 0 or batch == self.n_batches:
                shares = self._explained(encoder, observe)
                for what, share in shares.items():
                    record("R²", f"{name}, {what}", batch, share)
                record("Loss", name, batch, value.item())
                if isinstance(loss, AnInfoNCE) and isinstance(truth, AnInfoNCE):
                    record("Loss", f"{name}, at the truth", batch, truth.of_members(z, pairs).item())
                    for number, concentration in enumerate(loss.concentration.flatten().tolist(), 1):
                        record(f"Λ of {name}", str(number), batch, concentration)
        row: dict[str, str | float | None] = {"loss": name}
        row |= {f"R² of {what}": share for what, share in shares.items()}
        return row | self._concentrations(loss), encoder

    def _loss(self, name: LossOfLatents, device: torch.device) -> AnInfoNCE | InfoNCE:
        if name == "infonce":
            return InfoNCE(2.0, self.temperature)
        negatives = torch.full((self.dimension,), 0.0 if self.others else self.hard)
        n_members = self.ways if name == "ensemble" else 1
        return AnInfoNCE(self.dimension, self.initial, n_members=n_members, negatives=negatives).to(device)

    def _concentrations(self, loss: AnInfoNCE | InfoNCE) -> dict[str, float | None]:
        """Means of the smaller and the larger half of the learned Λ, the largest error, the correlation of two Λ."""
        columns = ("Λ of style", "Λ of content", "largest error of Λ", "correlation of both Λ")
        if isinstance(loss, InfoNCE):
            return dict.fromkeys(columns)
        learned = loss.concentration.detach().cpu()
        correlation = float(torch.corrcoef(learned.log())[0, 1]) if len(learned) == 2 else None
        learned, half = learned.sort().values, self.dimension // 2
        truth = self.concentrations.sort().values[: len(learned)]
        parts = learned[:, :half].mean(), learned[:, half:].mean(), ((learned - truth).abs() / truth).max()
        return dict(zip(columns, (*map(float, parts), correlation), strict=True))

    @torch.no_grad()
    def _explained(self, encoder: nn.Module, observe: nn.Module) -> dict[str, float]:
        """R² of style and content, on points outside the fit."""
        z = self._anchors(2 * self.n_test, self.generator("test"), test=True)
        outputs = self._outputs(encoder, observe(z)).double()
        design = torch.cat([outputs, outputs.new_ones(len(z), 1)], 1)
        fitted = torch.linalg.lstsq(design[: self.n_test], z[: self.n_test].double()).solution
        truth, half = z[self.n_test :].double(), self.dimension // 2
        residual = (design[self.n_test :] @ fitted - truth).square().mean(0) / truth.var(0)
        return {"style": float(1 - residual[:half].mean()), "content": float(1 - residual[half:].mean())}

    @torch.no_grad()
    def _knn(self, encoder: nn.Module, splits: Splits) -> float:
        device = self.generator("test").device
        pixels = (pixels_of(part).flatten(1).to(device) for part in (splits.train, splits.test))
        known, test = (self._outputs(encoder, inputs).cpu() for inputs in pixels)
        return knn_accuracy(known, splits.train.labels, test, splits.test.labels, k=_NEIGHBOURS)

    def _anchors(self, n: int, generator: torch.Generator, *, test: bool = False) -> Float[Tensor, "N D"]:
        if not self.drift:
            return uniform_on_sphere(n, self.dimension, generator)
        pole = torch.zeros(self.dimension, device=generator.device)
        pole[0] = -1 if test else 1
        return VonMisesFisher(pole, pole.new_tensor(self.drift)).sample(torch.Size([n]), generator=generator)

    def _told_apart(self) -> float:
        generator, n = self.generator("domains"), self.n_test
        z = torch.cat([self._anchors(2 * n, generator, test=test) for test in (False, True)]).cpu()
        domain, known = torch.arange(4 * n) // (2 * n), torch.arange(4 * n) % 2 == 0
        return linear_probe(z[known], domain[known], z[~known], domain[~known])

    def _outputs(self, encoder: nn.Module, observed: Tensor) -> Tensor:
        outputs = encoder(observed)
        if not outputs.isfinite().all():
            raise ValueError(f"the training diverged: lower learning_rate (now {self.learning_rate:g})")
        return F.normalize(outputs) if self.normalise else outputs

    def pairs(self, n_hard: int, device: torch.device) -> list[Pairs]:
        """The pairs of each way in a batch with `n_hard` near negatives for each anchor."""
        ways = range(1, self.ways + 1)
        return [pairs_of_way(self.batch_size, way, self.ways, n_hard, device, others=self.others) for way in ways]

    def batches(self, generator: torch.Generator) -> Iterator[Float[Tensor, "N D"]]:
        """Endless batches of latents: anchors, the positives of each way, then the near negatives of each anchor."""
        near_negatives = torch.full((self.dimension,), self.hard)
        for batch in count():
            anchors = self._anchors(self.batch_size, generator)
            parts = [anchors, *(near(anchors, concentration, generator) for concentration in self.concentrations)]
            if self.n_hard and batch >= self.hard_from:
                parts.append(near(anchors.repeat_interleave(self.n_hard, 0), near_negatives, generator))
            yield torch.cat(parts)


def uniform_on_sphere(n: int, dimension: int, generator: torch.Generator) -> Float[Tensor, "N D"]:
    """Uniform points on the sphere."""
    return F.normalize(torch.randn(n, dimension, generator=generator, device=generator.device))


def near(
    anchors: Float[Tensor, "N D"], concentration: Float[Tensor, " D"], generator: torch.Generator
) -> Float[Tensor, "N D"]:
    """A point x for each anchor z, with density e^(−Σ_d Λ_d (x_d − z_d)²) on the sphere, by rejection sampling.

    Raises:
        ValueError: If too few draws fall on the sphere, because the dimension is too high for Λ.
    """
    concentration = concentration.to(anchors)
    points, pending = torch.empty_like(anchors), torch.arange(len(anchors), device=anchors.device)
    for _ in range(_TRIES):
        noise = torch.randn(32, len(pending), anchors.shape[1], generator=generator, device=anchors.device)
        draws = anchors[pending] + noise / (2 * concentration).sqrt()
        is_near = (draws.norm(dim=2) - 1).abs() < _SHELL
        first = is_near.int().argmax(0)
        any_near = is_near.any(0)
        points[pending[any_near]] = F.normalize(draws[first, torch.arange(len(pending), device=draws.device)][any_near])
        pending = pending[~any_near]
        if len(pending) == 0:
            return points
    raise ValueError(
        f"hardly a draw falls on the sphere in {anchors.shape[1]} dimensions, with Λ from {concentration.min():g} to "
        f"{concentration.max():g}: lower the dimension, or raise style, content and hard"
    )


def observation(dimension: int, generator: torch.Generator) -> nn.Sequential:
    """The invertible network g: three linear layers with orthogonal weights, and leaky ReLUs between them."""
    modules: list[nn.Module] = []
    for n_in, n_out in pairwise([dimension] * 4):
        linear: Any = skip_init(nn.Linear, n_in, n_out, bias=False, device=generator.device)
        nn.init.orthogonal_(linear.weight, generator=generator)
        modules += [linear, nn.LeakyReLU(0.2)]
    return nn.Sequential(*modules[:-1]).requires_grad_(False)


def pairs_of_way(
    n_pairs: int, place: int, n_ways: int, n_hard: int, device: torch.device | str = "cpu", *, others: bool = True
) -> Pairs:
    """The pairs of one way in a batch; the positives are the block with the number `place` after the anchors.

    The negatives are the near negatives and, with `others`, the other anchors.
    """
    first_hard = (1 + n_ways) * n_pairs
    n = first_hard + n_hard * n_pairs
    positive, negative = torch.zeros(2, n, n, dtype=torch.bool, device=device)
    anchors = torch.arange(n_pairs)
    positive[anchors, anchors + place * n_pairs] = True
    negative[anchors.repeat_interleave(n_hard), torch.arange(first_hard, n)] = True
    if others:
        negative[:n_pairs, :n_pairs] = ~torch.eye(n_pairs, dtype=torch.bool, device=device)
    return Pairs(positive, negative, n_pairs, int(negative.sum()))
