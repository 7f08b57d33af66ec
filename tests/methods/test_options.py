"""A method's record refuses options outside their range."""

from typing import Any

import pytest

from lam import methods

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("aninfonce", {"concentration": -1.0}, "concentration.*-1"),
    ("aninfonce", {"n_members": 0}, "n_members.*1.*0"),
    ("aninfonce", {"n_members": 2, "crop_scales": (0.5,)}, "crop_scales must hold 2 scales, .* got 1"),
    ("aninfonce", {"crop_scales": (0.5,)}, r"crop_scales.*members.*\(0.5,\)"),
    ("aninfonce", {"crop_scales": (1.5,)}, r"crop_scale.*\(0, 1\]"),
    ("aninfonce", {"negatives": -1.0}, "negatives.*0.*-1"),
    ("aninfonce", {"negatives": 5.0}, "negatives.*5"),
    ("byol", {"momentum": 1.0}, r"momentum.*\[0, 1\).*1"),
    ("deep_ensemble", {"n_members": 1}, "n_members.*2.*1"),
    ("deep_ensemble", {"reference": 0}, "reference.*2.*0"),
    ("deep_ensemble", {"checkpoints": ["a.pth", "b.pth"]}, "file.*n_members=5 members.*2"),
    ("elk", {"hidden": 0}, "hidden.*1.*0"),
    ("hib", {"n_samples": 0}, "n_samples.*1.*0"),
    ("hib", {"kl_weight": -1.0}, "kl_weight.*0.*-1.0"),
    ("hib", {"scale": 0.0}, "scale.*positive.*0.0"),
    ("hib", {"offset": float("nan")}, "offset.*finite.*nan"),
    ("hib_vmf", {"epochs": 0}, "epochs.*1.*0"),
    ("knn_distance", {"k": 0}, "^k .*1.*0"),
    ("knn_distance", {"reference": 4}, "reference.*k = 5.*4"),
    ("laplace_online", {"memory_factor": 1.0}, r"memory_factor.*\(0, 1\).*1.0"),
    ("laplace_online", {"memory_factor": 0.0}, "got 0.0"),
    ("laplace_online", {"likelihood_scale": -1.0}, "likelihood_scale.*-1.0"),
    ("laplace_online", {"initial_precision": 0.0}, "initial_precision"),
    ("laplace_online", {"n_samples": 0}, "n_samples.*1"),
    ("laplace_online", {"refresh_every": 0}, "refresh_every.*1"),
    ("laplace_online", {"warmup_epochs": -1}, "warmup_epochs.*0"),
    ("laplace_online", {"negative_weight": 2.0}, "negative_weight must"),
    ("laplace_posthoc", {"tune_step": 0.1}, "tune_step needs tune='marginal_likelihood', got tune='calibration'"),
    ("laplace_posthoc", {"tune": "marginal_likelihood", "tune_step": 0.0}, "tune_step.*positive"),
    ("laplace_posthoc", {"layers": "all", "structure": "ekfac"}, "^structure.*diag, kron.*'ekfac'"),
    ("laplace_posthoc", {"predictive": "linearised"}, "^predictive.*layers"),
    ("laplace_posthoc", {"layers": "all", "fix": "full"}, "^layers.*cross terms"),
    ("laplace_posthoc", {"layers": ["head"], "pairs": "dataset"}, r"^layers=\['head'\].*pairs within batches"),
    ("loss_prediction", {"temperature": 0.0}, "temperature.*positive.*0"),
    ("mcinfonce", {"kappa_pos": 0.0}, "kappa_pos.*0"),
    ("mcinfonce", {"n_samples": 0}, "n_samples.*1.*0"),
    ("mcinfonce", {"start": 1.0}, "start.*above 1.*exp, got 1"),
    ("pfe", {"epochs": 0}, "epochs.*1.*0"),
    ("pfe", {"learning_rate": 0.0}, "learning_rate.*got 0.0"),
    ("simclr", {"weight": 0.0}, "weight.*got 0"),
    ("simclr", {"crop_scale": 2.0}, r"crop_scale.*\(0, 1\]"),
    ("simclr", {"jitter": 1.0}, r"jitter.*\[0, 1\).*1"),
    ("simclr", {"noise": -0.1}, "noise.*0.*-0.1"),
    ("simsiam", {"predictor": 0}, "predictor.*1.*0"),
    ("simsiam", {"weight": -1.0, "kappa": "none"}, "weight.*positive.*-1"),
    ("swav", {"n_prototypes": 1}, "n_prototypes.*2.*1"),
    ("swav", {"crop_scale": 0.0}, r"crop_scale.*\(0, 1\]"),
    ("varcon", {"epsilon": 0.2}, "epsilon.*±temperature, 0.1.*0.2"),
]


@pytest.mark.parametrize(("method", "options", "message"), REFUSED)
def test_an_option_outside_its_range_is_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.find(method)(**options)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("name", ["prior_precision", "likelihood_scale"])
def test_online_training_needs_a_scale_and_a_prior(name: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.*online training.*None"):
        methods.LaplaceOnline(**{name: None})
