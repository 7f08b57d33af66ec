"""Curvature of the contrastive loss: the diagonal GGN of a linear last layer, in closed form and over all pairs."""

from lam.hessians.batch import contrastive_ggn
from lam.hessians.contrastive import FIXES, SPLITS, Fix, Split
from lam.hessians.dataset import contrastive_ggn_dataset
from lam.hessians.diagonal import Diagonal
from lam.pairs.neighbours import Neighbours

__all__ = [
    "FIXES",
    "SPLITS",
    "Diagonal",
    "Fix",
    "Neighbours",
    "Split",
    "contrastive_ggn",
    "contrastive_ggn_dataset",
]
