"""`BayesianEncoder`: a network with a posterior over its last layer."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam.encoders.base import NO_INPUTS, Encoder, Prediction, Predictor, base_arguments
from lam.encoders.batches import Batch, HeldOut, as_batches, labelled_batches, split_batch
from lam.encoders.files import SavedEncoder, check_example, export_encoder
from lam.hessians.accumulate import LastLayerAccumulator
from lam.hessians.last_layer import check_feature_values
from lam.models.head import ADDED, check_weights, features_and_output
from lam.models.weights import by_plain_name
from lam.pairs.pairs import check_labels, targets_of
from lam.pairs.relation import Relation
from lam.posteriors import POSTERIORS, Posterior
from lam.retrieval import auroc
from lam.tuning.alterations import Recommendation, alterations, is_images
from lam.tuning.scale import CLIPPED_LIMIT, Tuning, best_posterior, calibrate_scale, complaint, tune_prior
from lam.utils.checks import check_choice, check_tensor
from lam.utils.files import check_output
from lam.utils.notes import Note
from lam.utils.registry import name_of
from lam.vmf.bessel import tabulate_for_export
from lam.vmf.embeddings import Embeddings, Mean

_OPTIONS = {"calibration": ("n_samples", "least", "greatest", "refinements"), "marginal_likelihood": ("step",)}


class BayesianEncoder(Encoder):
    """Map inputs to embeddings with uncertainty: a network, and a posterior over its head.

    Attributes:
        network: any module that ends in the head; None if inputs are features.
        head: path of the head in the network.
        posterior: the Gaussian over the head's weights.
        relation: rule for positive and negative pairs.
        mean: directions of embeddings: `network` for the network's output, the same for every posterior; or `sampled`
            for the mean direction of the samples, as in Warburg et al. (2023).
        tuning: the trials of the last `tune`, if any; `marginal_likelihood` has none.
        recommendation: the result of the last `recommend`; None after `tune` or `forget`.
        fitted: the settings and batches of the fit, which `tune` may repeat; None for a copy, a sum or a loaded
            encoder, and after `forget`.
    """

    kind = "laplace"
    posteriors: ClassVar[Mapping[str, type[Posterior]]] = POSTERIORS

    def __init__(
        self,
        network: nn.Module | None,
        head: str,
        posterior: Posterior,
        *,
        relation: Relation,
        mean: Mean = "network",
        **common: Any,
    ) -> None:
        super().__init__(network, head, relation=relation, **common)
        self.posterior = posterior
        self.mean: Mean = mean
        self.tuning: Tuning | None = None
        self.recommendation: Recommendation | None = None
        self.fitted: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "fitted": None}  # a copy does not hold the training data

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.posterior})"

    @property
    def dimension(self) -> int:
        return len(self.posterior.weight)

    def features(self, inputs: Batch | Iterable[Batch], *, progress: bool = False) -> Float[Tensor, "N P"]:
        """Inputs of the head (N, P), on the network's device, float32 or wider.

        Args:
            inputs: as in `predict`; features if there is no network.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for a head that was trained further since the fit, or features that are not finite.
        """
        self._check_head()
        batches = map(split_batch, tqdm(as_batches(inputs), desc="embedding", unit="batch", disable=not progress))
        none = self.posterior.weight.new_zeros(0, self.posterior.weight.shape[1])
        return torch.cat([none, *(features for _, features, _ in self._read(batches))])

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches: κ from samples of each output, joint samples from random heads."""
        self._check_head()
        embed = self.posterior.predictor(n_samples=n_samples, mean=self.mean)
        sample = self.posterior.joint_predictor(self.posterior.noise(n_samples)) if joint else None

        def predict(inputs: Any, offset: int) -> Prediction:
            features, output = self._features_and_output(inputs, offset)
            own = self._posterior_input(inputs, features)
            return Prediction(features, embed(own, output), None if sample is None else sample(own))

        return predict

    def _check_head(self) -> None:
        if self.network is not None and self.head != ADDED:
            check_weights(self.network, self.head, self.posterior.weight, self.posterior.bias)

    def diagnostics(self, features: Float[Tensor, "N P"]) -> dict[str, float]:
        """Metrics of tuning, recommendation and curvature, and the share of the variance from negative curvature."""
        return {
            **({} if self.tuning is None else self.tuning.metrics()),
            **({} if self.recommendation is None else self.recommendation.metrics()),
            **self.posterior.curvature.diagnostics(),
            **self._clipped_variance(features),
        }

    def tune(
        self,
        held_out: HeldOut | Iterable[Batch],
        by: Literal["calibration", "marginal_likelihood"] = "calibration",
        *,
        progress: bool = False,
        **options: Any,
    ) -> None:
        """Choose the likelihood scale s or the prior precision α.

        `calibration` chooses the s with the best score on held-out in-distribution data; see
        `lam.tuning.scale.calibrate_scale`. If negative curvature causes most of the predictive variance, it reads the
        batches of the fit again, fits non-negative curvatures of the same loss, and keeps the best posterior.

        `marginal_likelihood` chooses the α with the greatest Laplace evidence, without held-out data. It keeps s,
        because the evidence for two values of s cannot be compared without the normalisers of the loss's densities.

        Args:
            held_out: items with labels, outside the test data.
            by: the criterion.
            progress: show progress bars of `calibration` on standard error.
            options: `calibration` takes `n_samples` (by default the encoder's own), `least`, `greatest` and
                `refinements` of `lam.tuning.scale.calibrate_scale`. `marginal_likelihood` takes `step`, the size of a
                single step of log α towards higher evidence; by default, α goes to the maximum.

        Raises:
            ValueError: for an unknown `by`, an option of the other criterion, or data without labels.
        """
        check_choice("by", by, _OPTIONS)
        if unknown := [name for name in options if name not in _OPTIONS[by]]:
            raise ValueError(f"options of {by} are {', '.join(_OPTIONS[by])}; got {', '.join(unknown)}")
        self._check_head()
        self.recommendation = None
        if by == "marginal_likelihood":
            self.posterior, self.tuning = tune_prior(self.posterior, options.get("step")), None
            return
        held_out = HeldOut.of(held_out)
        batches = labelled_batches(held_out.batches, "tuning by calibration")
        posterior_inputs: list[Any] = []
        parts: list[Tensor] = []
        for own, features, of_batch in self._read(tqdm(batches, desc="embedding", unit="batch", disable=not progress)):
            posterior_inputs.append(own)
            parts.append(targets_of(features, of_batch))
        if not parts:
            raise ValueError("tuning needs at least one batch: the loader gave no batch")
        targets = torch.cat(parts)
        if self.relation.positive_within is None:
            check_labels(targets)
        relevance = held_out.relevance(self.relation, targets)
        options = {"n_samples": self.n_samples, "progress": progress, **options}
        tuned = calibrate_scale(self.posterior, posterior_inputs, relevance, **options)
        fitted = self.fitted if tuned.tuning.clipped_share > CLIPPED_LIMIT else None
        tried = [] if fitted is None else fitted.without_clipping(self.posterior)
        others = [calibrate_scale(other, posterior_inputs, relevance, **options) for other in tried]
        self.posterior, self.tuning = best_posterior(tuned, others)
        if problem := complaint(self.posterior, self.tuning):
            warnings.warn(problem, stacklevel=2)
        elif remark := self.tuning.remark:
            warnings.warn(remark, Note, stacklevel=2)

    def recommend(self, loader: Iterable[Batch], *, progress: bool = False) -> Recommendation:
        """Recommend κ or variance as OOD score, whichever better separates images from altered copies.

        κ depends on the variance divided by the squared length of an output. `ood_score` does not change.

        Args:
            loader: batches of held-out images (N, C, H, W), with or without targets.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for no inputs, or inputs that are not images.
        """
        parts: dict[str, list[Tensor]] = defaultdict(list)
        predict, n_items = self.predictor(n_samples=self.n_samples), 0
        for batch in tqdm(as_batches(loader), desc="recommending", unit="batch", disable=not progress):
            images = split_batch(batch)[0]
            if not is_images(images):
                raise ValueError("only images can be altered: give batches of floating-point tensors (N, C, H, W)")
            kinds = {"known": images, **alterations(images)} if len(images) else {}
            for kind, inputs in kinds.items():
                prediction = predict(inputs, n_items)
                embeddings = self.with_ambiguity(prediction.features, prediction.embeddings)
                parts[kind].append(torch.stack([-embeddings.kappa, embeddings.variance]).cpu())
            n_items += len(images)
        if not parts:
            raise ValueError(NO_INPUTS)
        doubts = {kind: torch.cat(of_batches, 1) for kind, of_batches in parts.items()}
        known = doubts.pop("known")
        self.recommendation = Recommendation(
            {
                score: {kind: auroc(known[row], doubt[row]) for kind, doubt in doubts.items()}
                for row, score in enumerate(("kappa", "variance"))
            }
        )
        return self.recommendation

    def forget(self, loader: Iterable[Batch], *, progress: bool = False) -> None:
        """Subtract the curvature of batches on which the posterior was fitted.

        `learn_ambiguity` may store directions of items. If you called it, call it again without the forgotten items.

        Args:
            loader: the batches to forget, as in the fit. Other batches raise no error: the posterior keeps only sums.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: if the posterior was not fitted in batches, if the batches are empty, or if no items or no
                matches would be left. After an error, the posterior is unchanged.
        """
        old = self.posterior
        if not (old.curvature.adds_up and self.relation.in_batches):
            raise ValueError(
                "only a posterior fitted in batches can forget: a running mean of training, or pairs of scope "
                '"dataset", cannot'
            )
        loader = as_batches(loader, labelled=True)
        batches = map(split_batch, tqdm(loader, desc="forgetting", unit="batch", disable=not progress))
        curvature, n_items = self._curvature_of(batches)
        if not 0 < n_items < old.n_items:
            raise ValueError(f"from 1 to {old.n_items - 1} of {old.n_items} items can be forgotten, got {n_items}")
        left = old.curvature - curvature
        if left.counts[0] < 1:
            raise ValueError(
                f"no {next(iter(left.curvature.terms))} would be left, so the posterior would have no curvature: "
                "forget fewer batches, or fit again without them"
            )
        self.posterior = replace(old, curvature=left, n_items=old.n_items - n_items)
        self.recommendation = self.fitted = None

    def __add__(self, other: "BayesianEncoder") -> "BayesianEncoder":
        """An encoder of the same network, as if fitted on the batches of both encoders.

        If the likelihood scales differ, for example after `tune`, the sum has the default scale: tune the sum.

        Raises:
            ValueError: if networks, relations or posteriors differ, or a posterior was not fitted in batches.
        """
        if not isinstance(other, BayesianEncoder):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        if not _same_network(self.network, other.network):
            raise ValueError("only encoders of one network can be added: their weights differ")
        if self.relation != other.relation:
            raise ValueError(
                f"only encoders with the same relation can be added, got {self.relation} and {other.relation}"
            )
        if not (self.relation.in_batches and self.posterior.curvature.adds_up and other.posterior.curvature.adds_up):
            raise ValueError(
                "only encoders fitted in batches can be added: a running mean of training, or pairs of scope "
                '"dataset", cannot'
            )
        joined = copy(self)
        joined.posterior = self.posterior + other.posterior
        joined.trained_on = [*self.trained_on, *other.trained_on]
        joined.tuning = joined.recommendation = None
        return joined

    def __radd__(self, other: int) -> "BayesianEncoder":
        """The encoder itself, for `sum`, which starts at 0."""
        return self if other == 0 else NotImplemented

    def settings(self) -> dict[str, Any]:
        """Settings of the posterior and its curvature, the trials of the last tuning, and the recommendation."""
        structure = name_of(self.posteriors, type(self.posterior), "lam.posteriors.POSTERIORS")
        return {
            "mean": self.mean,
            "tuning": None if self.tuning is None else asdict(self.tuning),
            "recommendation": None if self.recommendation is None else asdict(self.recommendation),
            "posterior": {"structure": structure, **self.posterior.settings()},
        }

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the posterior: weight, bias and the sums of the curvature."""
        self._check_head()
        return self.posterior.tensors()

    @classmethod
    def restored(cls, saved: SavedEncoder) -> "BayesianEncoder":
        settings = saved.settings
        check_choice("structure", settings["posterior"]["structure"], cls.posteriors)
        posterior = cls._restore_posterior(cls.posteriors[settings["posterior"]["structure"]], saved)
        encoder = cls(saved.network, saved.head, posterior, mean=settings["mean"], **base_arguments(saved))
        if settings["tuning"] is not None:
            encoder.tuning = Tuning.restored(settings["tuning"])
        if settings["recommendation"] is not None:
            encoder.recommendation = Recommendation(**settings["recommendation"])
        return encoder

    def export(self, path: str | Path, example: Tensor | None = None, *, n_samples: int | None = None) -> None:
        """Write one `torch.export` program from inputs to (features, mean, κ, variance), for any batch size.

        Without a network, the inputs are features. After `learn_ambiguity`, the program also returns κ_e, κ_a and
        p_known, after the variance.

        Args:
            path: the file, usually with the suffix .pt2.
            example: (N, ...) a batch of at least 2 inputs; by default zeros of the shape of `preprocessing`.
            n_samples: S ≥ 2 samples behind each κ; by default the encoder's own number.

        Raises:
            ValueError: with neither an example nor a preprocessing of fixed shape, for a head that was trained further
                since the fit, a network that `torch.export` cannot follow, or a path where no file can be written.
        """
        check_output(path)
        self._check_head()
        if example is None:
            shape = None if self.preprocessing is None else self.preprocessing.shape
            if shape is None:
                raise ValueError("the shape of an input is unknown: give an example, a batch of at least 2 inputs")
            example = torch.zeros(2, *shape, device=self.posterior.weight.device)
        check_example(example)
        embed = self.posterior.predictor(n_samples=self.n_samples_or_default(n_samples), mean=self.mean, checked=False)

        def predict(features: Tensor, output: Tensor | None) -> Embeddings:
            return self.with_ambiguity(features, embed(features, output))

        tabulate_for_export(self.dimension)
        network, head = (nn.Identity(), ADDED) if self.network is None else (self.network, self.head)
        export_encoder(path, example, network, head, predict)

    def _posterior_input(self, inputs: Any, features: Tensor) -> Any:
        return features

    def _clipped_variance(self, features: Tensor) -> dict[str, float]:
        return {"variance_clipped": self.posterior.clipped_variance_share(features)}

    def _curvature_of(self, batches: Iterable[tuple[Any, Any]]) -> tuple[Any, int]:
        """The summed curvature of batches (inputs, targets), as in fitting, and the number of items."""
        self._check_head()
        posterior = self.posterior
        return LastLayerAccumulator(
            empty=posterior.curvature.empty(),
            relation=self.relation,
            seed=posterior.seed,
            weight=posterior.weight,
            bias=posterior.bias,
        ).accumulate((features, targets) for _, features, targets in self._read(batches))

    def _read(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor, Any]]:
        """The posterior's input, the features and the targets of each batch (inputs, targets)."""
        n_items = 0
        for inputs, targets in batches:
            features, _ = self._features_and_output(inputs, n_items)
            n_items += len(features)
            yield self._posterior_input(inputs, features), features, targets

    @classmethod
    def _restore_posterior(cls, kind: type[Posterior], saved: SavedEncoder) -> Posterior:
        return kind.restored(saved.tensors, saved.settings["posterior"])

    def _features_and_output(self, inputs: Any, offset: int) -> tuple[Tensor, Tensor | None]:
        """Inputs of the head, and the output of the network's own head, if it has one."""
        output = None
        if self.network is None:
            check_tensor("features", inputs)
            features = inputs.detach()
        else:
            features, output = features_and_output(self.network, self.head, inputs)
        if features.ndim != 2 or features.is_complex():
            raise ValueError(
                "features must be real numbers of shape (N, P), one row for each item, got "
                f"{features.dtype} of shape {tuple(features.shape)}"
            )
        features = features.to(self.posterior.weight.dtype)
        check_feature_values(features, offset)
        return features, None if self.head == ADDED else output


def _same_network(one: nn.Module | None, other: nn.Module | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    first, second = by_plain_name(one.state_dict()), by_plain_name(other.state_dict())
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
