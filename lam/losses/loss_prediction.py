"""Loss prediction: a head learns the loss of each item."""

from jaxtyping import Bool, Float
from torch import Tensor

from lam.losses.base import weighted_mean


def loss_prediction(
    predicted: Float[Tensor, " N"], losses: Float[Tensor, " N"], counts: Bool[Tensor, " N"]
) -> Float[Tensor, ""]:
    """Mean of (u − ℓ)² over items, with the prediction u of an item's loss ℓ; ℓ gets no gradient.

    Source: Yoo and Kweon (2019), "Learning loss for active learning", compares losses in pairs; the squared error is
    by Kirchhof et al. (2023), "URL: a representation learning benchmark for transferable uncertainty estimates".

    Args:
        predicted: (N,) prediction for each item.
        losses: (N,) loss of each item.
        counts: (N,) whether an item has a loss; an item without a positive pair has none.

    Returns:
        A scalar, zero if no item has a loss.

    Raises:
        ValueError: for different lengths.

    Example:
        >>> import torch
        >>> loss_prediction(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 9.0]), torch.tensor([True, False]))
        tensor(4.)
    """
    if not predicted.shape == losses.shape == counts.shape:
        shapes = ", ".join(str(tuple(values.shape)) for values in (predicted, losses, counts))
        raise ValueError(f"predicted, losses and counts must have one value for each item, got shapes {shapes}")
    return weighted_mean((predicted - losses.detach()).square(), counts)
