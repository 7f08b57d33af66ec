"""`Curves`: the data of a run's curves, in `curves.safetensors`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.evaluation import Evaluation
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.files import read_tensors, write_tensors

CURVES = "curves.safetensors"
_OUTSIDE, _BINS = "outside/", "calibration/"


@dataclass(frozen=True)
class Curves:
    """Data of the sparsification, calibration and OOD curves of an evaluation.

    Attributes:
        correct: (Q,) whether the first hit is right, for queries with a match.
        uncertainty: (Q,) −κ of these queries.
        inside: (N,) the encoder's own OOD score of all queries; higher means more OOD.
        outside: (O,) the same score of the items of each OOD set.
        reliability: accuracy in bins of confidence; None for a method without samples.
    """

    correct: Bool[Tensor, " Q"]
    uncertainty: Float[Tensor, " Q"]
    inside: Float[Tensor, " N"]
    outside: dict[str, Tensor]
    reliability: ReliabilityBins | None

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Curves":
        """The curves of an evaluation."""
        answerable, primary = evaluation.answerable, evaluation.primary
        return cls(
            evaluation.correct[answerable],
            -evaluation.embeddings.kappa[answerable],
            evaluation.scores[primary],
            {name: scores[primary] for name, scores in evaluation.ood_scores.items()},
            evaluation.reliability,
        )

    @classmethod
    def load(cls, folder: str | Path) -> "Curves":
        """Read the curves of a run; call `lam.utils.files.verify` on its folder first."""
        tensors = read_tensors(Path(folder) / CURVES)
        outside = {name.removeprefix(_OUTSIDE): scores for name, scores in tensors.items() if name.startswith(_OUTSIDE)}
        bins = {name.removeprefix(_BINS): values for name, values in tensors.items() if name.startswith(_BINS)}
        reliability = ReliabilityBins(**bins) if bins else None
        return cls(tensors["correct"], tensors["uncertainty"], tensors["inside"], outside, reliability)

    def save(self, folder: str | Path) -> None:
        """Write the curves into the folder of a run."""
        bins = {} if self.reliability is None else vars(self.reliability)
        tensors = {"correct": self.correct, "uncertainty": self.uncertainty, "inside": self.inside}
        tensors |= {f"{_OUTSIDE}{name}": scores for name, scores in self.outside.items()}
        write_tensors(Path(folder) / CURVES, tensors | {f"{_BINS}{name}": values for name, values in bins.items()})

    @property
    def tells_apart(self) -> bool:
        """Whether the OOD score varies; it is constant for a method without uncertainty."""
        return len(torch.cat([self.inside, *self.outside.values()]).unique()) > 1
