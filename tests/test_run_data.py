import pytest
import torch

from lam.datasets import Splits, TensorImages
from lam.run_data import check_splits


def images(labels: list[int]) -> TensorImages:
    return TensorImages(torch.rand(len(labels), 1, 4, 4), torch.tensor(labels), classes=tuple("abcdefgh"))


ENOUGH = [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        ([0, 0, 1, 1], ENOUGH, "the train split must have at least 5 images, got 4: give more data"),
        ([0, 1, 2, 3, 4], ENOUGH, "no two images of the train split share a label, so none can be found"),
        (ENOUGH, [0], "the validation split must have at least 2 images, got 1"),
        (ENOUGH, [0, 1], "no two images of the validation split share a label"),
        (
            [0, 0, 0, 0, 0],
            ENOUGH,
            "the train split cannot be learned from: all 5 items have one label.* give more data",
        ),
    ],
)
def test_splits_in_which_nothing_can_be_learned_or_found_are_refused(
    train: list[int], validation: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_splits(Splits(images(train), images(validation), images(ENOUGH)))


def test_splits_that_serve_pass() -> None:
    check_splits(Splits(images(ENOUGH), images(ENOUGH), images(ENOUGH)))
