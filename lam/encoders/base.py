"""`Encoder`: the result of every method, and the input of index, metrics, report and service."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam.encoders import files as encoder_files
from lam.encoders.batches import Batch, HashedBatches, HeldOut, as_batches, labelled_batches, split_batch
from lam.encoders.files import SavedEncoder
from lam.hessians.last_layer import check_feature_values
from lam.inputs import AnyPreprocessing, preprocessing_from_json
from lam.models.head import n_items as count_items
from lam.models.kappa_head import KappaHead
from lam.pairs.pairs import targets_of
from lam.pairs.relation import Relation
from lam.tuning.ambiguity import Ambiguity, learn
from lam.utils.checks import check_at_least, check_choice
from lam.vmf.embeddings import Embeddings

OodScore = Literal["kappa", "knn"]
NO_INPUTS = "there are no inputs to embed"
N_SAMPLES = 32  # default number of samples S behind each κ


@dataclass(frozen=True)
class Prediction:
    """Features, embeddings and samples of N inputs, from one pass.

    Attributes:
        features: (N, P) inputs of the head.
        embeddings: embeddings of the N inputs.
        samples: (S, N, D) unit vectors. samples[s] are the embeddings of all items by one sampled network, or one draw
            from each item's distribution. None if not requested, or if the method has no samples.
    """

    features: Float[Tensor, "N P"]
    embeddings: Embeddings
    samples: Float[Tensor, "S N D"] | None = None

    @staticmethod
    def concatenate(parts: "list[Prediction]") -> "Prediction":
        """Join one or more batches, in order."""
        samples = [part.samples for part in parts if part.samples is not None]
        return Prediction(
            torch.cat([part.features for part in parts]),
            Embeddings.concatenate([part.embeddings for part in parts]),
            torch.cat(samples, 1) if len(samples) == len(parts) else None,
        )


Predictor = Callable[[Any, int], Prediction]
"""Maps a batch of inputs, and the position of its first input in the pass, to a prediction."""

Same = TypeVar("Same", bound="Encoder")  # the type checks of test runs reject typing.Self


class Encoder(ABC):
    """Map inputs to embeddings, each with a concentration κ.

    Threads may share encoders; a process runs one network at a time. Do not train a network that other threads use.

    Attributes:
        kind: name of the class for `lam.load`.
        has_kappa: whether κ is informative; for an encoder without uncertainty, only after `learn_ambiguity`.
        keeps: names of constructor arguments that are stored as attributes and written by `save`.
        ambiguity: model of κ_a and p_known (see `learn_ambiguity`); None until it is learned.

    Args:
        network: any module; None if inputs are features.
        head: path of the network's last linear layer, or `lam.models.head.ADDED` for a layer after the network.
        relation: rule for matching items.
        preprocessing: turns an image file into an input, if known.
        ood_score: score for OOD detection: `kappa`, or `knn`, the distance to training features.
        n_samples: default number S ≥ 2 of samples behind each κ. `save` writes S, because a threshold on κ is valid
            for one S only.
        trained_on: hashes of some training items; see `lam.encoders.batches`.
    """

    kind: ClassVar[str]
    has_kappa: bool = True
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        network: nn.Module | None,
        head: str,
        *,
        relation: Relation | None = None,
        preprocessing: AnyPreprocessing | None = None,
        ood_score: OodScore = "kappa",
        n_samples: int = N_SAMPLES,
        trained_on: Sequence[int] = (),
    ) -> None:
        check_choice("ood_score", ood_score, get_args(OodScore))
        self.network = network
        self.head = head
        self.relation = Relation() if relation is None else relation
        self.preprocessing = preprocessing
        self.ood_score: OodScore = ood_score
        self.n_samples = n_samples
        self.ambiguity: Ambiguity | None = None
        self.trained_on = list(trained_on)

    def __repr__(self) -> str:
        inputs = "features" if self.network is None else type(self.network).__name__
        return f"{type(self).__name__}({inputs}, dimension={self.dimension})"

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Number of dimensions of the mean directions."""

    @property
    def kappa_dimension(self) -> int:
        """Number of dimensions of the sphere on which κ is defined: equal to `dimension`, except for ensembles."""
        return self.dimension

    @abstractmethod
    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches. This call draws the noise that all batches share.

        Args:
            n_samples: S ≥ 2 samples behind each κ, for methods that draw.
            joint: whether predictions hold `Prediction.samples`.
        """

    @classmethod
    def restored(cls: type[Same], saved: SavedEncoder) -> Same:
        """An encoder from the contents of its folder."""
        own: dict[str, Any] = {**saved.settings, **saved.tensors}
        return cls(saved.network, saved.head, **own, **base_arguments(saved))

    def to(self: Same, device: torch.device | str) -> Same:
        """Move the encoder's network and tensors to a device, in place.

        Raises:
            ValueError: if `device` is a dtype; half precision would destroy the curvature of a posterior.
        """
        if isinstance(device, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f'device must be such as "cpu" or "cuda", got {device}: encoder.network.to({device}) converts the '
                "network, and the posterior keeps its type"
            )
        for name, part in vars(self).items():
            if hasattr(part, "to"):
                setattr(self, name, part.to(device))
        return self

    def predict(
        self,
        inputs: Batch | Iterable[Batch],
        *,
        n_samples: int | None = None,
        joint: bool = False,
        progress: bool = False,
    ) -> Prediction:
        """Features and embeddings of inputs, from one pass.

        Args:
            inputs: a batch, or a loader of batches, with or without targets.
            n_samples: S ≥ 2 samples behind each κ; by default the encoder's own number.
            joint: also return `Prediction.samples`.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for no items, features that are not finite, or fewer than 2 samples.
        """
        parts = self.predict_batches(inputs, n_samples=n_samples, joint=joint, progress=progress)
        return Prediction.concatenate(list(parts))

    def predict_labelled(self, loader: Iterable[Batch], purpose: str, **options: Any) -> tuple[Prediction, Tensor]:
        """The prediction for batches (inputs, targets), and the targets on the device of the features.

        Args:
            loader: batches, each with labels or positions.
            purpose: the purpose of the targets, for the error about a batch without targets.
            options: `n_samples`, `joint` and `progress`, as in `predict`.

        Raises:
            ValueError: as `predict`; also for items without a target.
        """
        targets: list[Any] = []

        def inputs_alone() -> Iterator[Any]:
            for inputs, own in labelled_batches(loader, purpose):
                targets.append(own)
                yield inputs

        parts: list[Prediction] = []
        for part in self.predict_batches(inputs_alone(), **options):
            targets[-1] = targets_of(part.features, targets[-1])
            parts.append(part)
        return Prediction.concatenate(parts), torch.cat(targets)

    def embed(
        self, inputs: Batch | Iterable[Batch], *, n_samples: int | None = None, progress: bool = False
    ) -> Embeddings:
        """Embeddings of inputs, each with its κ; arguments and errors as in `predict`."""
        parts = self.predict_batches(inputs, n_samples=n_samples, progress=progress)
        return Embeddings.concatenate([part.embeddings for part in parts])

    def n_samples_or_default(self, n_samples: int | None) -> int:
        """`n_samples`, or by default the encoder's own number; a `ValueError` below 2."""
        check_at_least("n_samples", n_samples, 2)
        return self.n_samples if n_samples is None else n_samples

    def diagnostics(self, features: Float[Tensor, "N P"]) -> dict[str, float]:
        """Metrics of this kind of encoder only, by their key in a run's `metrics.json`."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Constructor arguments that `save` writes as JSON; by default all arguments in `keeps` except tensors."""
        return {name: value for name in self.keeps if not isinstance(value := getattr(self, name), Tensor)}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that `save` writes in addition to the network; by default the tensors in `keeps`."""
        return {name: value for name in self.keeps if isinstance(value := getattr(self, name), Tensor)}

    def predict_batches(
        self,
        inputs: Batch | Iterable[Batch],
        *,
        n_samples: int | None = None,
        joint: bool = False,
        progress: bool = False,
    ) -> Iterator[Prediction]:
        """The prediction of each batch with items, one at a time; arguments and errors as in `predict`."""
        predict, n_items = self.predictor(n_samples=self.n_samples_or_default(n_samples), joint=joint), 0
        for batch in tqdm(as_batches(inputs), desc="embedding", unit="batch", disable=not progress):
            if count_items(own := split_batch(batch)[0]) == 0:
                continue
            prediction = predict(own, n_items)
            check_feature_values(prediction.features, n_items)
            n_items += len(prediction.features)
            yield replace(prediction, embeddings=self.with_ambiguity(prediction.features, prediction.embeddings))
        if n_items == 0:
            raise ValueError(NO_INPUTS)

    def with_ambiguity(self, features: Float[Tensor, "N P"], embeddings: Embeddings) -> Embeddings:
        """Embeddings with κ from κ_e, κ_a and p_known; unchanged before `learn_ambiguity`."""
        return embeddings if self.ambiguity is None else self.ambiguity(features, embeddings)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def learn_ambiguity(
        self,
        held_out: HeldOut | Iterable[Batch],
        *,
        reference: Iterable[Batch] | None = None,
        kappa_head: KappaHead | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        """Learn κ_a, the concentration of an item's matches, and p_known, the probability that it is in-distribution.

        After this call, the κ of an embedding combines three parts: κ_e (the κ before this call), κ_a and p_known. If
        one part is small, κ is small. Embeddings store the parts as `kappa_epistemic`, `kappa_aleatoric` and `p_known`.
        Directions, posterior and samples stay the same. `lam.tuning.ambiguity` has the formula.

        Args:
            held_out: items that the network was not trained on; training items lie closer to their matches.
            reference: further known items that can be neighbours of an item, such as training items.
            kappa_head: a trained κ head of the same network that computes κ_a, so that only p_known is learned.
            seed: seed of all draws.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for data without labels, features that are not finite, fewer than 20 items with a match, or a
                κ head for another number of features.
        """
        held_out = HeldOut.of(held_out)
        remembered = HashedBatches(as_batches(held_out.batches, labelled=True))
        prediction, labels = self.predict_labelled(remembered, "learning the ambiguity", progress=progress)
        if seen := remembered.among(self.trained_on):
            warnings.warn(
                f"the held-out items contain {seen} of {len(self.trained_on)} known training items, which makes κ too "
                "large for other items: give items that the network was not trained on",
                stacklevel=4,  # skips two decorators
            )
        n_samples = prediction.embeddings.mean_samples or 2  # directions that are means depend on it
        known = None if reference is None else self.predict(reference, n_samples=n_samples, progress=progress)
        self.ambiguity = learn(
            prediction.features,
            prediction.embeddings.mean,
            held_out.relevance(self.relation, labels),
            reference=None if known is None else (known.features, known.embeddings.mean),
            kappa_head=kappa_head,
            seed=seed,
        )
        self.has_kappa = True

    def save(self, folder: str | Path) -> None:
        """Write the encoder to a folder as safetensors, JSON and a manifest; this replaces an encoder in the folder.

        Raises:
            ValueError: if the folder holds other files, such as a run or an index, the network's state_dict holds more
                than tensors, or `n_samples` was set to less than 2.
        """
        encoder_files.save(
            folder,
            SavedEncoder(
                kind=self.kind,
                network=self.network,
                head=self.head,
                relation=asdict(self.relation),
                preprocessing=None if self.preprocessing is None else self.preprocessing.to_json(),
                ood_score=self.ood_score,
                n_samples=self.n_samples_or_default(self.n_samples),  # another value could not be loaded
                settings=self.settings(),
                tensors=self.tensors(),
                trained_on=self.trained_on,
                ambiguity=None if self.ambiguity is None else self.ambiguity.tensors(),
            ),
        )


def base_arguments(saved: SavedEncoder) -> dict[str, Any]:
    """The arguments that every `Encoder` takes, from a saved encoder."""
    return {
        "relation": Relation(**saved.relation),
        "preprocessing": None if saved.preprocessing is None else preprocessing_from_json(saved.preprocessing),
        "ood_score": saved.ood_score,
        "n_samples": saved.n_samples,
        "trained_on": saved.trained_on,
    }


def directions_of(rows: Float[Tensor, "*B P"]) -> Float[Tensor, "*B P"]:
    """Directions f/‖f‖ of outputs or features, float32 or wider; zero rows stay zero."""
    return F.normalize(at_least_float32(rows), dim=-1)


def at_least_float32(output: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """A network's output in float32 or wider; sums and quotients in half precision lose digits."""
    return output.to(torch.promote_types(output.dtype, torch.float32))
