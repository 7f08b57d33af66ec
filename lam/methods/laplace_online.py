"""Online Laplace: a network learns together with its posterior, under noise from the posterior.

Each step samples the last layer from the posterior, applies the loss's gradient at the sample to the mean, and updates
the curvature by the batch's curvature (Monte-Carlo EM).

Source: Warburg et al. (2023), section 3 and appendix E.2; Miani et al. (2022).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.bayesian import BayesianEncoder
from lam.hessians import Curvature, Diagonal, diagonal_ggn
from lam.hessians.structures.base import split_bias
from lam.inputs.preprocessing import Preprocessing
from lam.losses import Loss
from lam.losses.base import settings_of
from lam.methods.base import Learned, Trained, can_learn, head_of, inputs_of
from lam.methods.fit import detached_copies
from lam.methods.laplace_posthoc import OWN, LaplaceMethod, LaplacePosthoc, fit_posterior, learned_parameters
from lam.models.head import find_head, head_input_and_output
from lam.models.weights import unwrapped
from lam.pairs.mining import MinerName, Mining
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Relation
from lam.posteriors.last_layer import DiagonalPosterior
from lam.posteriors.settings import check_settings
from lam.training import DivergenceError, Minibatch, Step, Training
from lam.utils.checks import check_at_least, check_choice, check_positive, check_share
from lam.utils.random import derive_seed, on_device

Update = Literal["average", "accumulate"]
_FOR_REFIT = ("mean", "curvature", "margin", "split", "fix", "negative_weight", "likelihood_scale")
_AFTER_TRAINING = ("refit", "tune", "tune_step", "mean")
"""Options that take effect after the training; a resumed run may change them."""


@dataclass(frozen=True, kw_only=True)
class LaplaceOnline(LaplaceMethod):
    """Train a network and its posterior together. A weight with curvature h has the precision s relu(h) + α.

    Attributes:
        head: path of the last linear layer; found by default.
        likelihood_scale: factor s > 0 of the curvature h.
        prior_precision: precision α > 0 of the prior.
        initial_precision: first precision p₀ > 0; the first curvature is h = p₀/s. The default is s/1000.
        memory_factor: β in (0, 1) of the update h ← β h + (1 − β) h_batch, with the curvature h_batch of a batch.
        update: `average` as above, or `accumulate` by h ← β h + relu(h_batch), with h_batch averaged over the chosen
            pairs. Accumulation makes the noise far smaller; the code and equation 5 of Warburg et al. accumulate.
        n_samples: last layers sampled in a step, at least 1; gradient and h_batch are means over them.
        warmup_epochs: number of first epochs without noise, less than all; h is updated in these, too.
        refresh_every: steps from one update of h to the next.
        refit: whether to form the curvature again after training, at the final weights, with the structure and the
            prior of `laplace_posthoc`. Without a refit, h is a mean over past, noisy layers, and κ detects altered
            images less well.
        hessian_miner: pairs of h_batch: `all`, or pairs of `violating`, `easy`, `semihard` or `hard` triplets; see
            `lam.pairs.Mining`.
        hessian_max_pairs: largest number of random triplets; for `all`, of positive and of negative pairs each.
    """

    head: str | None = None
    likelihood_scale: float = 1e7
    prior_precision: float = 1.0
    initial_precision: float | None = None
    memory_factor: float = 0.999
    update: Update = "average"
    n_samples: int = 1
    warmup_epochs: int = 0
    refresh_every: int = 1
    refit: bool = False
    hessian_miner: MinerName = "all"
    hessian_max_pairs: int | None = None

    name = "laplace_online"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.prior_precision, self.likelihood_scale)
        for name in ("prior_precision", "likelihood_scale"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be positive and finite in online training, got None")
        check_positive("initial_precision", self.initial_precision)
        check_share("memory_factor", self.memory_factor)
        check_choice("update", self.update, get_args(Update))
        for name, least in (("n_samples", 1), ("refresh_every", 1), ("warmup_epochs", 0)):
            check_at_least(name, getattr(self, name), least)
        _ = self.loss_curvature
        try:
            Mining(self.hessian_miner, self.hessian_max_pairs)
        except ValueError as error:
            raise ValueError(f"hessian_{error}") from None

    def check_start(self, *, pretrained: bool) -> None:
        """Reject a trained network, because the method trains from the start."""
        if pretrained:
            raise ValueError(
                "laplace_online cannot start from a trained network, as it forms the posterior in training: use "
                "laplace_posthoc, or train without the checkpoint"
            )

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and its posterior; see `Method.train`. Stages are `train` and, with `refit`, `fit`."""
        network = unwrapped(network)
        self.check(network, dataset, training)
        if self.curvature == OWN:
            return self.resolved(training).train(network, dataset, training)
        path = head_of(network, dataset, self.head)
        refit = self._refit(path, training) if self.refit else None
        step = OnlineLaplaceStep(path, self)
        histories = self.train_network(network, dataset, training, step)
        if refit is not None:
            return Trained(fit_posterior(refit, network, dataset, training, histories), histories)
        head_of(network, dataset, path)  # a batch norm after the head is the identity only before the training
        common = inputs_of(dataset, training)
        learned = learned_parameters(histories)
        encoder = step.encoder(network, training.loss, learned, n_items=len(dataset), seed=training.seed, **common)
        return Trained(encoder, histories)

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject options that do not fit the network, the loss or the labels; see `Method.check`."""
        super().check(network, dataset, training)
        if not can_learn(network):
            raise ValueError(
                "laplace_online trains, but no parameter of the network requires a gradient: use laplace_posthoc, or "
                "call requires_grad_() on the layers to train"
            )
        if self.warmup_epochs >= training.epochs:
            raise ValueError(
                f"warmup_epochs must be below epochs, {training.epochs}, got {self.warmup_epochs}: no step would "
                "sample the last layer"
            )
        path, options = head_of(network, dataset, self.head), self.resolved(training)
        _ = options.curvature_of(training.loss)
        if self.refit:
            options._refit(path, training)

    def _refit(self, head: str, training: Training) -> LaplacePosthoc:
        """The method of the refit. For places, it takes pairs of the whole data set, as batches hold hardly any."""
        has_places = not training.by_label
        if has_places and self.hessian_miner != "all":
            raise ValueError("refit takes all pairs of places: leave out hessian_miner, or refit")
        return LaplacePosthoc(
            head=head,
            **{name: getattr(self, name) for name in _FOR_REFIT},
            pairs="dataset" if has_places else "batch",
            miner=self.hessian_miner,
            max_pairs=None if has_places else self.hessian_max_pairs,
            batch_size=training.batch_size,
        )


class OnlineLaplaceStep(Step):
    """A training step: the gradient at last layers sampled from the posterior, and an update of the curvature h.

    Args:
        head: path of the last linear layer.
        options: options of the posterior; missing settings of the curvature come from the loss at each step.
    """

    def __init__(self, head: str, options: LaplaceOnline) -> None:
        self.head, self.options = head, options
        self.own = self.curvature = options.loss_curvature
        self.mining = Mining(options.hessian_miner, options.hessian_max_pairs)
        self.h: Tensor | None = None
        self.n_steps = 0
        resumed = {name: value for name, value in asdict(options).items() if name not in _AFTER_TRAINING}
        if isinstance(options.curvature, Curvature):
            resumed["curvature"] = repr(options.curvature)
        self.settings = {**resumed, "head": head}

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the mean gradient at the samples, and update h; see `Step.backward`.

        For each sampled layer, miners choose pairs by the embeddings of this layer.
        """
        layer: Any = unwrapped(network).get_submodule(self.head)
        features = batch.gather(head_input_and_output(network, self.head, batch.inputs)[0])
        self.curvature = self.own.with_defaults(settings_of(loss))
        theta = layer.weight if layer.bias is None else torch.cat([layer.weight, layer.bias[:, None]], 1)
        if self.h is None:
            scale, initial = self.options.likelihood_scale, self.options.initial_precision
            h = (scale / 1000 if initial is None else initial) / scale
            self.h = torch.full_like(theta, h, dtype=torch.float32)
        self.h = self.h.to(theta.device)
        # a negative h would make a weight wider than its prior, or its precision negative
        deviation = (self.options.likelihood_scale * self.h.relu() + self.options.prior_precision).rsqrt()
        if batch.epoch < self.options.warmup_epochs:
            deviation = torch.zeros_like(deviation)
        samples: list[Tensor] = []
        embeddings: list[Tensor] = []
        value = torch.zeros((), device=theta.device)
        generator = on_device(batch.generator, theta.device)  # moving a wide layer's noise takes longer than a step
        for _ in range(self.options.n_samples):
            noise = torch.randn(theta.shape, generator=generator, device=theta.device).to(theta)
            samples.append(theta + deviation * noise)
            weight, bias = split_bias(samples[-1], layer.bias is not None)
            output = F.linear(features, weight.to(features), None if bias is None else bias.to(features))
            embeddings.append(F.normalize(output).to(theta.dtype))
            mined = batch.choose_pairs(embeddings[-1], loss)
            value = value + loss(embeddings[-1], mined) / self.options.n_samples
        backward(value)
        if self.n_steps % self.options.refresh_every == 0 and value.isfinite():
            pairs = [batch.choose_pairs(sample, loss, self.mining) for sample in embeddings]
            self._update_h(features.detach().float(), [sample.detach().float() for sample in samples], pairs, layer)
        self.n_steps += 1
        return value.detach()

    def encoder(
        self,
        network: nn.Module,
        loss: Loss,
        learned: Learned,
        *,
        n_items: int,
        seed: int,
        relation: Relation,
        **inputs: Any,
    ) -> BayesianEncoder:
        """The network with the posterior of h; `learned` are the loss's parameters, `inputs` as for `Encoder`."""
        options = self.options
        if self.h is None:
            raise ValueError("the posterior has not been trained: take at least one step")
        layer: Any = network.get_submodule(self.head)
        curvature = options.curvature_of(loss, learned)
        diagonal = Diagonal(self.h[None], None, curvature, layer.bias is not None)  # None: a mean cannot be added up
        posterior = DiagonalPosterior(
            *detached_copies(layer.weight, layer.bias),
            diagonal.to(layer.weight.device),
            n_items=n_items,
            prior_precision=options.prior_precision,
            likelihood_scale=options.likelihood_scale,
            seed=seed,
        )
        mined: Any = {"scope": "batch", "miner": options.hessian_miner, "max_pairs": options.hessian_max_pairs}
        relation = replace(relation, **mined)
        return BayesianEncoder(network, self.head, posterior, mean=options.mean, relation=relation, **inputs)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.h is None else {"h": self.h, "steps": torch.tensor(self.n_steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.h = state["h"].clone() if "h" in state else None
        self.n_steps = int(state["steps"]) if "steps" in state else 0

    def _update_h(self, features: Tensor, samples: list[Tensor], pairs: list[Pairs], layer: Any) -> None:
        options, h = self.options, cast(Tensor, self.h)
        h_batch = torch.zeros_like(samples[0])
        for sample, mined in zip(samples, pairs, strict=True):
            if not mined.paired.any():  # then many curvatures have no mean
                continue
            weight, bias = split_bias(sample, layer.bias is not None)
            if options.update == "accumulate":  # a mean over the chosen pairs, not over all pairs of the batch
                counts = [max(1, round(float(chosen.sum()))) for chosen in (mined.positive, mined.negative)]
                mined = replace(mined, n_positives=counts[0], n_negatives=counts[1])
            try:
                ggn = diagonal_ggn(features, weight, bias, mined, self.curvature)
            except ValueError as error:
                raise DivergenceError(f"the curvature of a batch is unusable ({error})") from error
            h_batch += ggn.h / len(samples)
        increment = (1 - options.memory_factor) * h_batch if options.update == "average" else h_batch.relu()
        new_h = options.memory_factor * h + increment
        if not new_h.isfinite().all():
            raise DivergenceError("the curvature h is not finite")
        self.h = new_h


class OnlinePosterior:
    """The posterior of `LaplaceOnline` in a training loop of your own, where `backward` replaces `loss.backward()`.

    Args:
        network: the network that the loop trains; the first batch determines its last linear layer.
        loss: a loss of `lam.losses`; the loop's optimizer must also train the parameters of a `TrainableLoss`.
        options: options of the posterior; `refit` and `warmup_epochs` belong to `LaplaceOnline.train`.
        relation: definition of positive and negative pairs; by default by label.
        seed: seed of the sampled layers; at least 0.

    Example:
        >>> import lam
        >>> digits = lam.datasets.load("digits").train
        >>> network = lam.models.build("convnet8", dimension=16)
        >>> posterior = OnlinePosterior(network, lam.losses.build(margin=0.7))
        >>> optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        >>> for images, labels in torch.utils.data.DataLoader(digits, batch_size=64, shuffle=True):
        ...     optimizer.zero_grad()
        ...     loss = posterior.backward(images, labels)
        ...     optimizer.step()
        >>> posterior.encoder(n_items=len(digits)).embed(digits.images[:10]).kappa.shape
        torch.Size([10])
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Loss,
        options: LaplaceOnline | None = None,
        *,
        relation: Relation | None = None,
        seed: int = 0,
    ) -> None:
        options = LaplaceOnline() if options is None else options
        if options.refit or options.warmup_epochs:
            raise ValueError("refit and warmup_epochs need LaplaceOnline.train: leave them out; lam.fit fits again")
        self.training = Training(loss=loss, epochs=1, relation=relation or Relation(), seed=seed)  # checks them
        self.options = options.resolved(self.training)
        _ = self.options.curvature_of(loss)
        self.network = unwrapped(network)
        self._step: OnlineLaplaceStep | None = None
        self._first: Any = None
        self._state: Mapping[str, Tensor] = {}

    def backward(
        self, inputs: Any, targets: Tensor, *, backward: Callable[[Tensor], None] = Tensor.backward
    ) -> Float[Tensor, ""]:
        """Add the gradient at sampled last layers to the parameters' `grad`, and update the curvature.

        Args:
            inputs: (N, ...) inputs, on the network's device.
            targets: (N,) labels, or (N, X) positions.
            backward: replaces `Tensor.backward`, such as `fabric.backward`.

        Returns:
            The loss, a detached scalar.

        Raises:
            ValueError: for a batch without a positive pair, which the loop should skip, or a network without a head.
            DivergenceError: if the curvature is not finite.
        """
        pairs = self.training.relation.pairs(targets)
        pairs.check_positives()
        if self._step is None:
            self._first = inputs
            self._step = OnlineLaplaceStep(find_head(self.network, inputs, self.options.head), self.options)
            self._step.load_state_dict(self._state)
        generator = torch.Generator().manual_seed(derive_seed(self.training.seed, self._step.n_steps, "step"))
        batch = Minibatch(inputs, pairs, 0, generator, targets)
        return self._step.backward(self.network, self.training.loss, batch, backward)

    def encoder(self, *, n_items: int, preprocessing: Preprocessing | None = None) -> BayesianEncoder:
        """The network with its posterior, after training on `n_items` items; more training needs another encoder."""
        if self._step is None:
            raise ValueError("the posterior has not been trained: take at least one step")
        find_head(self.network, self._first, self._step.head)  # a batch norm after the head is the identity at first
        training = self.training
        return self._step.encoder(
            self.network,
            training.loss,
            training.loss.learned(),
            n_items=n_items,
            seed=training.seed,
            relation=training.relation,
            preprocessing=preprocessing,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The curvature and the number of steps, for a checkpoint."""
        return dict(self._state) if self._step is None else self._step.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`."""
        self._step, self._state = None, dict(state)
