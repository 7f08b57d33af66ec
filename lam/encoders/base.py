"""`Encoder`: what every method hands back, and all that index, metrics, report and service know of a method.

How one is trained is in `lam.methods`; how one is read back from a folder in `lam.encoders.load`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam.encoders import files as encoder_files
from lam.encoders.batches import Batch, as_batches, split_batch
from lam.encoders.files import SavedEncoder
from lam.hessians.batch import check_finite
from lam.inputs.preprocessing import Preprocessing
from lam.pairs.relation import Relation
from lam.vmf.embeddings import Embeddings

OodScore = Literal["kappa", "knn"]
NO_INPUTS = "there are no inputs to embed"
N_SAMPLES = 32
"""Samples behind a κ, of an encoder that is not told otherwise."""


@dataclass(frozen=True)
class Prediction:
    """What one pass over N inputs gives.

    Attributes:
        features: (N, P) what k-NN compares and `norm` measures: what enters the head.
        embeddings: of the N inputs.
        samples: (S, N, E) unit vectors, of which those with one s may be compared with each other: drawn under one
            sampled network, or, where a method has distributions of embeddings alone, one from each. None where samples
            were not asked for, or the method has none.
    """

    features: Float[Tensor, "N P"]
    embeddings: Embeddings
    samples: Float[Tensor, "S N E"] | None = None

    @staticmethod
    def concatenate(parts: "list[Prediction]") -> "Prediction":
        """Join batches, in order.

        Raises:
            ValueError: for no part at all.
        """
        if not parts:
            raise ValueError(NO_INPUTS)
        drawn = [part.samples for part in parts if part.samples is not None]
        return Prediction(
            torch.cat([part.features for part in parts]),
            Embeddings.concatenate([part.embeddings for part in parts]),
            torch.cat(drawn, 1) if len(drawn) == len(parts) else None,
        )


Predictor = Callable[[Any], Prediction]
"""Maps one batch of inputs to what is seen of it."""


class Encoder(ABC):
    """Map inputs to embeddings that know how sure they are.

    Attributes:
        kind: what `lam.load` finds the class by.
        has_kappa: whether κ says anything: not of an encoder without uncertainty.
        network: any module; None where features are given directly.
        head: path of the network's last linear layer, or `lam.models.head.ADDED` for one that comes after the network.
        relation: what makes two items match.
        preprocessing: how an image file becomes an input, where that is known.
        ood_score: by what an input is recognised as out of distribution: `kappa`, or `knn` where κ cannot know.
        n_samples: S ≥ 2 samples behind each κ, unless a call asks for others. It is saved with the encoder, since a
            threshold on κ, or the mean of samples, is comparable with those of as many samples alone.

    Args:
        network: see above.
        head: see above.
        relation: see above.
        preprocessing: see above.
        ood_score: see above.
        n_samples: see above.

    Raises:
        ValueError: for another `ood_score`.
    """

    kind: ClassVar[str]
    has_kappa: ClassVar[bool] = True

    def __init__(
        self,
        network: nn.Module | None,
        head: str,
        *,
        relation: Relation | None = None,
        preprocessing: Preprocessing | None = None,
        ood_score: OodScore = "kappa",
        n_samples: int = N_SAMPLES,
    ) -> None:
        if ood_score not in get_args(OodScore):
            raise ValueError(f"ood_score must be one of {', '.join(get_args(OodScore))}, got {ood_score!r}")
        self.network = network
        self.head = head
        self.relation = Relation() if relation is None else relation
        self.preprocessing = preprocessing
        self.ood_score: OodScore = ood_score
        self.n_samples = n_samples

    @property
    @abstractmethod
    def dimension(self) -> int:
        """The number of dimensions of the embeddings' mean directions."""

    @property
    def kappa_dimension(self) -> int:
        """The number of dimensions of the sphere that κ is a concentration on; that of the embeddings but for a few."""
        return self.dimension

    @abstractmethod
    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """Give what a batch of inputs goes through; what is drawn once for all batches is drawn here.

        Args:
            n_samples: S ≥ 2 samples behind each κ, where a method draws any.
            joint: also draw samples that may be compared across items.
        """

    @classmethod
    @abstractmethod
    def restored(cls, saved: SavedEncoder) -> "Encoder":
        """Make the encoder again from what `save` wrote."""

    def to(self, device: torch.device | str) -> "Encoder":
        """Move the encoder to a device, in place."""
        if self.network is not None:
            self.network.to(device)
        return self

    def predict(
        self,
        inputs: Batch | Iterable[Batch],
        *,
        n_samples: int | None = None,
        joint: bool = False,
        progress: bool = False,
    ) -> Prediction:
        """Give features, embeddings and, with `joint`, samples in one pass.

        Args:
            inputs: a batch, or a loader of batches (alone, or followed by targets).
            n_samples: S ≥ 2 samples behind each κ; by default the encoder's own number.
            joint: also draw samples that may be compared across items.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for no item at all, features that are not finite, or fewer than 2 samples.
        """
        options: dict[str, Any] = {"n_samples": n_samples, "joint": joint, "progress": progress}
        return Prediction.concatenate(list(self.observed(inputs, **options)))

    def embed(
        self, inputs: Batch | Iterable[Batch], *, n_samples: int | None = None, progress: bool = False
    ) -> Embeddings:
        """Embed inputs with a concentration κ each; arguments and errors as those of `predict`."""
        seen = self.observed(inputs, n_samples=n_samples, progress=progress)
        return Embeddings.concatenate([batch.embeddings for batch in seen])

    def samples_of(self, n_samples: int | None) -> int:
        """How many samples S a call takes that asks for this many, or for none in particular.

        Raises:
            ValueError: for fewer than 2.
        """
        n_samples = self.n_samples if n_samples is None else n_samples
        if n_samples < 2:
            raise ValueError(f"n_samples must be at least 2, got {n_samples}")
        return n_samples

    def diagnostics(self, features: Float[Tensor, "N P"]) -> dict[str, float]:
        """Give what a method has to say of itself in a run's metrics; nothing by default."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What `save` keeps beside the tensors, as JSON."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What `save` keeps beside the network."""
        return {}

    def observed(
        self,
        inputs: Batch | Iterable[Batch],
        *,
        n_samples: int | None = None,
        joint: bool = False,
        progress: bool = False,
    ) -> Iterator[Prediction]:
        """Observe batch by batch, for passes whose features would not fit; arguments and errors as `predict`."""
        predict, seen = self.predictor(n_samples=self.samples_of(n_samples), joint=joint), 0
        for batch in tqdm(as_batches(inputs), desc="embedding", unit="batch", disable=not progress):
            found = predict(split_batch(batch)[0])
            check_finite(found.features, seen)
            seen += len(found.features)
            yield found
        if seen == 0:
            raise ValueError(NO_INPUTS)

    def save(self, folder: str | Path) -> None:
        """Write the encoder to a folder: safetensors and JSON, sealed; whatever was there is replaced at once."""
        encoder_files.save(
            folder,
            SavedEncoder(
                kind=self.kind,
                network=self.network,
                head=self.head,
                relation=asdict(self.relation),
                preprocessing=None if self.preprocessing is None else self.preprocessing.to_json(),
                ood_score=self.ood_score,
                n_samples=self.n_samples,
                settings=self.settings(),
                tensors=self.tensors(),
            ),
        )


def common_of(saved: SavedEncoder) -> dict[str, Any]:
    """Give the keywords that every encoder is made with, from what was saved."""
    return {
        "relation": Relation(**saved.relation),
        "preprocessing": None if saved.preprocessing is None else Preprocessing.from_json(saved.preprocessing),
        "ood_score": saved.ood_score,
        "n_samples": saved.n_samples,
    }


def own_direction(output: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """The directions f/‖f‖ of a network's output, float32 or wider; zero where f is."""
    return F.normalize(at_least_float32(output))


def at_least_float32(output: Float[Tensor, "*A"]) -> Float[Tensor, "*A"]:
    """What a network computed, in a type of at least float32: of half precision, nothing is summed or divided."""
    return output.to(torch.promote_types(output.dtype, torch.float32))
