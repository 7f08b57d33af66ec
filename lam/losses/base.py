"""`Loss`, the base of all training losses; more base classes, distances and weighted means."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lam.pairs.pairs import Pairs
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_margin, check_positive


class Loss(ABC):
    """A loss on unit embeddings and the pairs among them.

    Attributes:
        curvature: name of the loss's curvature, or of a similar curvature, in `lam.hessians.CURVATURES`.
        needs_classes: whether pairs must come from class labels, not from distances between positions.
    """

    curvature: ClassVar[str] = "contrastive"
    needs_classes: ClassVar[bool] = False

    @without_autocast()
    def __call__(self, embeddings: Float[Tensor, "N D"], pairs: Pairs) -> Float[Tensor, ""]:
        """Loss of a batch; lower is better. It is zero without pairs, for example if a miner chose no pair.

        Args:
            embeddings: (N, D) unit rows; half precision is widened to float32.
            pairs: the pairs among these N items.

        Returns:
            A scalar; its gradient is finite also at distance 0 and at the margin.

        Raises:
            ValueError: for labels instead of pairs, or pairs of another number of items. For InfoNCE, SupCon, VarCon
                and AnInfoNCE, also without a positive pair.
        """
        if not isinstance(pairs, Pairs):
            raise ValueError(
                f"pairs must be lam.pairs.Pairs, such as Pairs.by_label(labels), got {type(pairs).__name__}"
            )
        pairs.check_size(len(embeddings))
        loss = self._compute(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), pairs)
        if not isinstance(loss, Tensor) or loss.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""  # pyright: ignore
            raise ValueError(
                f"{type(self).__name__}._compute must return a tensor of one number, got {type(loss).__name__}{shape}"
            )
        return loss

    def __repr__(self) -> str:
        """Class and settings; a checkpoint names its loss by this text, without memory addresses."""
        return f"{type(self).__name__}({_as_text(vars(self))})"

    @classmethod
    def configured(cls, *, margin: float, temperature: float, dimension: int | None) -> "Loss":
        """The loss with the settings of a configuration that its constructor takes.

        Args:
            margin: in (0, 2].
            temperature: τ > 0.
            dimension: D of the embeddings, if known.

        Raises:
            ValueError: for a setting outside its range, or a constructor that needs another argument.
        """
        settings = {"margin": margin, "temperature": temperature, "dimension": dimension}
        signature = inspect.signature(cls)
        given = {name: settings[name] for name in settings.keys() & signature.parameters.keys()}
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"a configuration gives {cls.__name__} only margin, temperature and dimension ({error}): give other "
                "arguments a default, or override the class method `configured`"
            ) from None
        return cls(**given)

    def learned(self) -> dict[str, list[float]]:
        """Learned values by name; empty for most losses."""
        return {}

    @abstractmethod
    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor: ...


@dataclass(frozen=True)
class MarginLoss(Loss):
    """A loss whose negative pairs have a gradient only within a margin.

    Attributes:
        margin: in (0, 2]; negative pairs at this distance or beyond have no gradient.
    """

    margin: float

    def __post_init__(self) -> None:
        if self.margin is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError(f"{type(self).__name__} needs a margin in (0, 2], got None: give one")
        check_margin(self.margin)


class TrainableLoss(Loss, nn.Module):
    """A loss with parameters, trained together with the network.

    Training uses a copy of the loss, so a second training starts from the same values; see `History.learned`.

    Args:
        margin: margin in (0, 2] for miners and a contrastive curvature; the loss itself does not use it.
    """

    def __init__(self, margin: float | None = None) -> None:
        super().__init__()
        check_margin(margin)
        self.margin = margin

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def extra_repr(self) -> str:
        """Settings: all attributes except modules, parameters and buffers."""
        return _as_text({name: value for name, value in vars(self).items() if name not in vars(nn.Module())})


@dataclass(frozen=True)
class TemperatureLoss(Loss):
    """A loss of cosines divided by a temperature: every pair has a gradient.

    Attributes:
        margin: margin in (0, 2] for miners and a contrastive curvature, or None; the loss itself does not use it.
        temperature: τ > 0.
    """

    margin: float | None = None
    temperature: float = 0.1

    def __post_init__(self) -> None:
        check_margin(self.margin)
        if self.temperature is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError(f"{type(self).__name__} needs a positive temperature, got None: give one")
        check_positive("temperature", self.temperature)


def _as_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def margin_of(loss: Loss) -> float | None:
    """The margin of a loss, or None."""
    return getattr(loss, "margin", None)


def settings_of(loss: Loss) -> dict[str, Any]:
    """Settings of a loss that its curvature can share, by name: margin, temperature and learned values."""
    temperature = getattr(loss, "temperature", None)
    return {"margin": margin_of(loss), "temperature": temperature, **as_settings(loss.learned())}


def as_settings(learned: Mapping[str, Sequence[float]]) -> dict[str, float | tuple[float, ...]]:
    """Learned values as settings: a single value as a number, several values as a tuple.

    Raises:
        ValueError: If a value is a number, not a list.
    """
    try:
        return {name: values[0] if len(values) == 1 else tuple(values) for name, values in learned.items()}
    except TypeError as error:
        raise ValueError(
            f"the method learned of a loss must return lists of numbers by name, got {learned!r:.80}: give [value] for "
            "a number, values.tolist() for a vector"
        ) from error


def squared_distances(embeddings: Float[Tensor, "N D"]) -> Float[Tensor, "N N"]:
    """Squared distances ‖a − b‖² = 2 − 2 a·b of unit rows."""
    return 2 - 2 * embeddings @ embeddings.T


def weighted_mean(values: Float[Tensor, "*B"], weights: Shaped[Tensor, "*B"]) -> Float[Tensor, ""]:
    """Σ w x / Σ w, or zero if all weights are zero."""
    total = weights.sum().to(values.dtype)
    return weighted_sum(values, weights) / torch.where(total > 0, total, torch.ones_like(total))


def weighted_sum(values: Float[Tensor, "*B"], weights: Shaped[Tensor, "*B"]) -> Float[Tensor, ""]:
    """Σ w x."""
    return (weights.to(values.dtype) * values).sum()
