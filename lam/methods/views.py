"""Methods that learn without labels, from two random views of each image."""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from torch import nn

from lam.datasets.views import TwoViews, Views
from lam.losses import Loss
from lam.losses.alignment import Explicit, Regulariser
from lam.methods.base import Learned
from lam.methods.concentration import ConcentrationMethod, KappaBy
from lam.models.kappa_head import Form
from lam.pairs.relation import Relation
from lam.training import Training


@dataclass(frozen=True)
class ViewsMethod(ConcentrationMethod):
    """Train μ and κ together on two random views of each image, without labels.

    The loss has three parts: a loss on directions, the alignment of the two views scaled by their κ, and a regulariser
    of κ. κ is the softplus of the κ head's output; kappa="none" keeps only the loss on directions. The network's head
    is the projection; the option `projection` of `cifar_resnet18` gives it two layers, as in the sources. A run keeps
    the epoch of the best retrieval on the validation split, or the last epoch if no two images match there.

    Source: "Probabilistic contrastive learning with explicit concentration on the hypersphere", equations 5, 6, 10, 11.

    Attributes:
        weight: weight λ_a of the alignment.
        regulariser: "square", λκ², or "likelihood", κ − (D − 1)/2 log κ.
        decay: λ of "square".
        crop_scale: least share of an image's area that a view shows.
        flip: probability that a view is mirrored; leave 0 if left and right differ in meaning.
        jitter: largest change of a view's contrast and brightness.
        noise: largest standard deviation of a view's Gaussian noise, in standard deviations of the image.
    """

    kappa: KappaBy = "shared"
    start: float = 5.0
    weight: float = 0.05
    regulariser: Regulariser = "square"
    decay: float = 0.005
    crop_scale: float = 0.3
    flip: float = 0.0
    jitter: float = 0.4
    noise: float = 0.0

    reads_labels = False
    form: ClassVar[Form] = "softplus"

    def __post_init__(self) -> None:
        super().__post_init__()
        Explicit(self.weight, self.regulariser, self.decay)
        self.view()

    def view(self) -> Views:
        """The settings of a view."""
        return Views(crop_scale=self.crop_scale, flip=self.flip, jitter=self.jitter, noise=self.noise)

    def explicit(self) -> Explicit | None:
        """The alignment and its regulariser; None without κ."""
        return None if self.kappa == "none" else Explicit(self.weight, self.regulariser, self.decay)

    def trained_by(self, loss: Loss, dimension: int, learned: Learned | None = None) -> dict[str, Any]:
        """The curvature, with the settings of the views; see `Method.trained_by`."""
        return {**super().trained_by(loss, dimension, learned), "views": asdict(self.view())}

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject data without images; see `Method.check`."""
        super().check(network, *self.training_data(dataset, training))

    def training_data(self, dataset: Any, training: Training) -> tuple[Any, Training]:
        """Two views of each image; all other images of a batch are negatives."""
        training = replace(training, relation=Relation(), per_class=None, miner="all", max_pairs=None)
        return TwoViews(dataset, self.view()), training
