"""Curvature of a loss in the weights of a linear last layer: one file a loss, one file a structure."""

from lam.hessians.batch import contrastive_ggn, diagonal_ggn
from lam.hessians.dataset import contrastive_ggn_dataset, diagonal_ggn_dataset
from lam.hessians.losses import (
    CURVATURES,
    ContrastiveCurvature,
    Curvature,
    InfoNCECurvature,
    SupConCurvature,
    register,
)
from lam.hessians.losses.contrastive import FIXES, SPLITS, Fix, Split
from lam.hessians.structures.diagonal import Diagonal
from lam.pairs.neighbours import Neighbours

__all__ = [
    "CURVATURES",
    "FIXES",
    "SPLITS",
    "ContrastiveCurvature",
    "Curvature",
    "Diagonal",
    "Fix",
    "InfoNCECurvature",
    "Neighbours",
    "Split",
    "SupConCurvature",
    "contrastive_ggn",
    "contrastive_ggn_dataset",
    "diagonal_ggn",
    "diagonal_ggn_dataset",
    "register",
]
