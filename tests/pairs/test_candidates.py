import jaxtyping
import pytest
import torch

from lam.pairs import Candidates
from lam.vmf import VonMisesFisher, mean_resultant_length


def test_by_label_and_paired():
    bank = Candidates.by_label(torch.tensor([0, 1, 5]), torch.eye(4), torch.tensor([0, 0, 1, 2]))
    assert (bank.size, bank.n_positives, bank.n_matched) == (3, 3, 2)
    assert torch.equal(bank.negative, ~bank.positive)
    view = Candidates.paired(torch.eye(3))
    assert (view.size, view.n_positives, view.n_matched) == (3, 3, 3)
    soft = Candidates(torch.eye(3), 0.2 * torch.eye(3), torch.zeros(3, 3))
    assert soft.n_positives == 3  # pairs, whatever their weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unit_vectors_of_low_precision_are_accepted(dtype: torch.dtype):
    directions = torch.nn.functional.normalize(torch.randn(2000, 3, generator=torch.Generator().manual_seed(0)))
    Candidates.paired(directions.to(dtype))
    mean_resultant_length(directions.to(dtype), unbiased=False)
    assert VonMisesFisher.support.check(directions.to(dtype)).all()


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"\(N, O\).*3 candidates.*\(2, 2\) and \(2, 2\)"):
        Candidates(torch.eye(3), torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="directions.*2.*index 1"):
        Candidates.paired(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    with pytest.raises(ValueError, match="directions.*nan.*index 0"):
        Candidates.paired(torch.tensor([[float("nan"), 0.0]]))
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"weights.*0.*{weight:g}.*\(0, 1\)"):
            Candidates(torch.eye(2), torch.eye(2), torch.tensor([[0.0, weight], [1.0, 0.0]]))
    with pytest.raises(ValueError, match="labels.*integers"):
        Candidates.by_label(torch.zeros(2), torch.eye(2), torch.arange(2))
    with pytest.raises(ValueError, match="candidates.*5.*candidates.*2"):
        Candidates.paired(torch.eye(2)).check_size(5)
