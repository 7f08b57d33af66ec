"""Curvatures in the weights of a layer; one file a structure."""

from lam.hessians.structures.base import MAX_MEMORY, Structure, SummedCurvature
from lam.hessians.structures.diagonal import Diagonal
from lam.hessians.structures.ekfac import Ekfac
from lam.hessians.structures.full import Full
from lam.hessians.structures.kron import Kron
from lam.hessians.structures.layers import LayersCurvature, LayersDiagonal, LayersKron
from lam.hessians.structures.low_rank import LowRank

__all__ = [
    "MAX_MEMORY",
    "Diagonal",
    "Ekfac",
    "Full",
    "Kron",
    "LayersCurvature",
    "LayersDiagonal",
    "LayersKron",
    "LowRank",
    "Structure",
    "SummedCurvature",
]
