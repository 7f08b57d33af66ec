"""`BayesianEncoder`: a network whose last layer has a posterior. How one is fitted is in `lam.methods`."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam import encoder_files
from lam.curvature import Batch, Relation, as_batches, curvature_in_batches, split_batch
from lam.embeddings import Embeddings
from lam.export import export_encoder
from lam.head import features_and_output
from lam.hessians.last_layer import check_finite
from lam.posterior import LastLayerPosterior, Mode
from lam.preprocessing import Preprocessing
from lam.tuning import Tuning, calibrate_scale

_TUNED = {"calibration": "likelihood_scale", "marginal_likelihood": "prior_precision"}


class BayesianEncoder:
    """Map inputs to embeddings that know how sure they are: a network, and a posterior over its head.

    Attributes:
        network: any module that ends in the head; None where features are given directly.
        head: the head's path in the network.
        posterior: the Gaussian over the head's weights.
        relation: what makes two items a positive or a negative pair.
        preprocessing: how an image file becomes an input, where that is known.
        tuning: what the last `tune` tried, if any.
    """

    def __init__(
        self,
        network: nn.Module | None,
        head: str,
        posterior: LastLayerPosterior,
        *,
        relation: Relation,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        self.network = network
        self.head = head
        self.posterior = posterior
        self.relation = relation
        self.preprocessing = preprocessing
        self.tuning: Tuning | None = None

    @property
    def dimension(self) -> int:
        """The number of embedding dimensions D."""
        return len(self.posterior.weight)

    def to(self, device: torch.device | str) -> "BayesianEncoder":
        """Move network and posterior to a device, in place."""
        if self.network is not None:
            self.network.to(device)
        self.posterior = self.posterior.to(device)
        return self

    def features(self, inputs: Batch | Iterable[Batch], *, progress: bool = False) -> Float[Tensor, "N P"]:
        """Give what enters the head.

        Args:
            inputs: a batch for the network, or a loader of batches (alone, or followed by targets); without a network,
                the features themselves.
            progress: show a progress bar on standard error.

        Returns:
            (N, P), on the network's device, float32 or wider.

        Raises:
            ValueError: where features are not finite, with the index of the first.
        """
        parts = list(self._feature_batches(inputs, progress))
        return torch.cat(parts) if parts else self.posterior.weight.new_zeros(0, self.posterior.weight.shape[1])

    def embed(
        self,
        inputs: Batch | Iterable[Batch],
        *,
        n_samples: int = 32,
        mode: Mode = "marginal",
        return_samples: bool = False,
        progress: bool = False,
    ) -> Embeddings:
        """Embed inputs with a concentration κ each.

        Args:
            inputs: as `features` takes them.
            n_samples: S ≥ 2 samples behind each κ.
            mode: `marginal`, where an item's κ is the same alone and in any batch; or `network`, where samples are
                consistent across items.
            return_samples: keep the (S, N, D) samples.
            progress: show a progress bar on standard error.

        Returns:
            One record of all N items.

        Raises:
            ValueError: for no item at all, features that are not finite, or options outside their range.
        """
        predict = self.posterior.predictor(n_samples=n_samples, mode=mode, return_samples=return_samples)
        parts = [predict(batch) for batch in self._feature_batches(inputs, progress)]
        if not parts:
            raise ValueError("there are no inputs to embed")
        return Embeddings.concatenate(parts)

    def tune(
        self,
        loader: Iterable[Batch],
        by: Literal["calibration", "marginal_likelihood"] = "calibration",
        *,
        over: Literal["likelihood_scale", "prior_precision"] | None = None,
        **options: Any,
    ) -> None:
        """Choose the likelihood scale or the prior precision; h stays as it is.

        `calibration` minimises the retrieval ECE on held-out in-distribution data over the likelihood scale s.
        `marginal_likelihood` maximises the Laplace evidence over the prior precision α, at the s in force; it needs no
        data. It cannot choose s, which would take the normalisers of the loss's densities.

        Args:
            loader: held-out batches with labels, never the data that are reported.
            by: what to optimise.
            over: what is chosen; the criterion knows, and another is refused.
            options: of `calibration`: `n_samples`, `least`, `greatest` and `refinements` of
                `lam.tuning.calibrate_scale`.

        Raises:
            ValueError: for another `by` or `over`, options that the criterion does not have, or data without labels.
        """
        if by not in _TUNED:
            raise ValueError(f"by must be one of {', '.join(_TUNED)}, got {by!r}")
        if over not in (None, _TUNED[by]):
            raise ValueError(f"{by} can choose {_TUNED[by]}, not {over!r}: choose another criterion for that")
        if by == "marginal_likelihood":
            if options:
                raise ValueError(f"marginal_likelihood takes no options, got {', '.join(options)}")
            self.posterior = self.posterior.with_best_prior()
            return
        if self.relation.positive_within is not None:
            raise ValueError("calibration needs labels; an encoder of places has positions, tune it on labelled data")
        batches = [(self._features_of(inputs), targets) for inputs, targets in map(split_batch, as_batches(loader))]
        if not batches or any(targets is None for _, targets in batches):
            raise ValueError("tuning by calibration needs batches of inputs with labels")
        labels = torch.cat([torch.as_tensor(targets) for _, targets in batches])
        features = torch.cat([features for features, _ in batches])
        self.posterior, self.tuning = calibrate_scale(self.posterior, features, labels.to(features.device), **options)

    def forget(self, loader: Iterable[Batch], *, progress: bool = False) -> None:
        """Take batches back out of the posterior, the same ones that it was fitted on.

        Args:
            loader: the batches to forget, cut as they were when they were fitted. Only sums are kept, so that batches
                which were never fitted cannot be told from those that were.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: where the posterior was fitted over a whole data set, which does not fall into batches, or more
                would be forgotten than was learned.
        """
        if not self.relation.in_batches:
            raise ValueError(
                f"only a posterior fitted in batches can forget; pairs of this one are of scope {self.relation.scope}"
            )
        old = self.posterior
        batches = map(split_batch, tqdm(as_batches(loader), desc="forgetting", unit="batch", disable=not progress))
        curvature, n_items = curvature_in_batches(
            ((self._features_of(inputs), targets) for inputs, targets in batches),
            old.weight,
            old.bias,
            self.relation,
            margin=old.curvature.margin,
            split=old.curvature.split,
            fix=old.curvature.fix,
            negative_weight=old.curvature.negative_weight,
        )
        if n_items >= old.n_items:
            raise ValueError(f"cannot forget {n_items} of {old.n_items} items: nothing would be left")
        self.posterior = replace(old, curvature=old.curvature - curvature, n_items=old.n_items - n_items)

    def __add__(self, other: "BayesianEncoder") -> "BayesianEncoder":
        """Join two encoders of one network, fitted on different batches, into the one fitted on all of them.

        Raises:
            ValueError: where networks or settings differ, or one was fitted over a whole data set at once.
        """
        if not _same_network(self.network, other.network):
            raise ValueError("only encoders of one network add up: their weights differ")
        if self.relation != other.relation or not self.relation.in_batches:
            raise ValueError(
                f"only encoders fitted in batches, with one relation, add up; got {self.relation} and {other.relation}"
            )
        posterior = self.posterior + other.posterior
        return BayesianEncoder(
            self.network, self.head, posterior, relation=self.relation, preprocessing=self.preprocessing
        )

    def save(self, folder: str | Path) -> None:
        """Write the encoder to a folder: safetensors and JSON, sealed; whatever was there is replaced at once."""
        encoder_files.save(
            folder,
            network=self.network,
            head=self.head,
            posterior=self.posterior,
            relation=asdict(self.relation),
            preprocessing=None if self.preprocessing is None else self.preprocessing.to_json(),
            tuning=None if self.tuning is None else asdict(self.tuning),
        )

    def export(self, path: str | Path, example: Tensor | None = None, *, n_samples: int = 32) -> None:
        """Write one `torch.export` program that maps inputs to (features, mean, κ, variance), for any batch size.

        Args:
            path: the file, which should end in .pt2.
            example: (N, ...) a batch of inputs of the right shape, N ≥ 2; by default blank images of the shape that
                `preprocessing` gives.
            n_samples: S ≥ 2 samples behind each κ.

        Raises:
            ValueError: where there is no network, or no example and no preprocessing of one shape.
        """
        if self.network is None:
            raise ValueError("an encoder without a network cannot be exported: it has no inputs but features")
        if example is None:
            shape = None if self.preprocessing is None else self.preprocessing.shape
            if shape is None:
                raise ValueError("the shape of an input is not known: give an example, a batch of at least 2 inputs")
            example = torch.zeros(2, *shape, device=self.posterior.weight.device)
        export_encoder(path, example, self.network, self.head, self.posterior, n_samples=n_samples)

    def _feature_batches(self, inputs: Batch | Iterable[Batch], progress: bool) -> Iterator[Tensor]:
        seen = 0
        for batch in tqdm(as_batches(inputs), desc="embedding", unit="batch", disable=not progress):
            features = self._features_of(split_batch(batch)[0], seen)
            seen += len(features)
            yield features

    def _features_of(self, inputs: Any, offset: int = 0) -> Tensor:
        if self.network is None:
            features = inputs
        else:
            features, _ = features_and_output(self.network, self.head, inputs)
        features = features.to(self.posterior.weight.dtype)
        check_finite(features, offset)
        return features


def _same_network(one: nn.Module | None, other: nn.Module | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(tensor, yours[name]) for name, tensor in mine.items())


def load(folder: str | Path, network: nn.Module | None = None) -> BayesianEncoder:
    """Read an encoder that `BayesianEncoder.save` wrote.

    Args:
        folder: where it was saved.
        network: where lam cannot rebuild it by name: one of the same architecture, whose weights are replaced.

    Returns:
        The encoder, equal to the one saved, to the bit.

    Raises:
        CorruptFileError: naming the file that is missing, truncated or altered.
        ValueError: where the network is needed and missing, or has other tensors or shapes, naming them.
    """
    saved = encoder_files.load(folder, network)
    encoder = BayesianEncoder(
        saved.network,
        saved.head,
        saved.posterior,
        relation=Relation(**saved.relation),
        preprocessing=None if saved.preprocessing is None else Preprocessing.from_json(saved.preprocessing),
    )
    if saved.tuning is not None:
        tried = tuple((float(scale), float(error)) for scale, error in saved.tuning.pop("tried"))
        encoder.tuning = Tuning(**saved.tuning, tried=tried)
    return encoder
