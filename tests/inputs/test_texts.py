"""Texts as UTF-8 bytes of one length."""

from typing import Any

import pytest
import torch

from lam.inputs import Preprocessing, TextPreprocessing, preprocessing_from_json
from lam.inputs.preprocessing import texts_of
from tests.helpers import unchecked


@pytest.mark.parametrize("text", ["a", "né à 東京", "tab\tand\nline", "😀" * 16])
def test_bytes_and_back(text: str) -> None:
    preprocessing = TextPreprocessing(max_bytes=64)
    inputs = torch.stack([preprocessing(text), preprocessing("other")])
    assert inputs.dtype == torch.uint8
    assert inputs.shape == (2, *preprocessing.shape)
    assert texts_of(inputs) == [text, "other"]


def test_a_long_text_is_cut_between_characters() -> None:
    preprocessing = TextPreprocessing(max_bytes=7)
    assert preprocessing.kept("東京都") == "東京"
    assert texts_of(preprocessing("東京都")[None]) == ["東京"]
    assert preprocessing.kept("  short ") == "short"


def test_zero_bytes_are_left_out_and_half_characters_replaced() -> None:
    assert texts_of(TextPreprocessing()("a\0b\ud800")[None]) == ["ab?"]


@pytest.mark.parametrize(
    "inputs", [TextPreprocessing()("one"), torch.randn(2, 384), torch.ones(2, 9, dtype=torch.long)]
)
def test_tensors_that_are_no_batch_of_texts_are_refused(inputs: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"batch of bytes, uint8 \(N, L\).*torch.stack"):
        unchecked(texts_of)(inputs)


@pytest.mark.parametrize("text", ["", "  \n", "\0\0"])
def test_an_empty_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="text is empty"):
        TextPreprocessing()(text)


@pytest.mark.parametrize("missing", [None, float("nan"), 3])
def test_what_is_no_text_is_refused(missing: Any) -> None:
    with pytest.raises(ValueError, match=f"text.*string.*{missing}"):
        unchecked(TextPreprocessing.kept)(TextPreprocessing(), missing)


@pytest.mark.parametrize("max_bytes", [3, 0, -1])
def test_length_is_checked(max_bytes: int) -> None:
    with pytest.raises(ValueError, match="max_bytes.*bytes.*4"):
        TextPreprocessing(max_bytes=max_bytes)


def test_json_tells_texts_from_images() -> None:
    for preprocessing in (TextPreprocessing(max_bytes=99), Preprocessing.imagenet(32)):
        assert preprocessing_from_json(preprocessing.to_json()) == preprocessing
    with pytest.raises(ValueError, match="no field size.*max_bytes"):
        preprocessing_from_json({"max_bytes": 8, "size": 3})
