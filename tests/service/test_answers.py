"""What is said of a query, where it is computed in another way than `lam.retrieval` does."""

import pytest
import torch

from lam.embeddings import KAPPA_RANGE, Embeddings
from lam.retrieval.threshold import credible_cosine
from lam.service.answers import Judge


@pytest.mark.parametrize("dimension", [2, 3, 64, 512])
def test_the_credible_cap_is_that_of_the_distribution(dimension: int) -> None:
    judge = Judge(None, dimension)
    generator = torch.Generator().manual_seed(0)
    kappa = 10 ** (14 * torch.rand(50, generator=generator, dtype=torch.float64) - 6)
    kappa = torch.cat([kappa, torch.tensor(KAPPA_RANGE, dtype=torch.float64)])
    mean = torch.eye(1, dimension, dtype=torch.float64).expand(len(kappa), -1)
    exact = credible_cosine(Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa)))
    found = torch.tensor([judge.credible_cosine(value) for value in kappa.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)


def test_without_calibration_nothing_is_promised() -> None:
    judge = Judge(None, 3)
    assert judge.state(10) == "none"
    assert judge.poor(1.0) is None
    assert judge.thresholds is None
    assert judge.described is None
