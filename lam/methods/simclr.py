"""SimCLR with an explicit concentration: two views of each image, no labels, κ from how well the views agree.

Source: "Probabilistic contrastive learning with explicit concentration on the hypersphere"; Chen et al. (2020), "A
simple framework for contrastive learning of visual representations".
"""

from dataclasses import dataclass, replace
from typing import Any

from lam.datasets.augmented import AugmentationOptions
from lam.datasets.views import TwoViews
from lam.losses import ConcentrationAlignment
from lam.losses.alignment import Regulariser
from lam.methods.concentration import ConcentrationMethod, KappaBy
from lam.training import Training


@dataclass(frozen=True)
class Simclr(ConcentrationMethod):
    """Train μ and κ together on two random views of each image; the labels of the training part are not read.

    The loss is NT-Xent of the directions, the alignment of the two views that their concentrations scale, and a
    regulariser of these. κ is softplus of the head's number. The network's own head stands where the source has a
    projection of two layers. As with every method, a run keeps the epoch whose retrieval is best on the validation
    part, and the labels of that one are read.

    Attributes:
        weight: λ_a of the alignment.
        regulariser: "square", λκ², or "likelihood", κ − (D − 1)/2 log κ.
        decay: λ of the square.
        temperature: τ of NT-Xent.
        crop_scale: least share of an image's area that a view shows.
        flip: probability that a view is mirrored; 0 where left and right mean something.
        jitter: how far contrast and brightness of a view are drawn from the image's.
    """

    kappa: KappaBy = "shared"
    start: float = 5.0
    weight: float = 0.05
    regulariser: Regulariser = "square"
    decay: float = 0.005
    temperature: float = 0.5
    crop_scale: float = 0.3
    flip: float = 0.0
    jitter: float = 0.4

    name = "simclr"
    form = "softplus"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.view()
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")

    def view(self) -> AugmentationOptions:
        """Crops and flips of a view."""
        return AugmentationOptions(crop_scale=self.crop_scale, flip=self.flip)

    def loss(self) -> ConcentrationAlignment:
        """The loss with these options."""
        return ConcentrationAlignment(self.weight, self.regulariser, self.decay, self.temperature)

    def trained_on(self, dataset: Any, training: Training) -> tuple[Any, Training]:
        """Two views of each image, all other images of a batch being negatives."""
        views = TwoViews(dataset, self.view(), jitter=self.jitter)
        return views, replace(training, relation=None, per_class=None, miner="all", max_pairs=None)
