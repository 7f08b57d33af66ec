"""A method's record refuses options outside their range."""

from typing import Any

import pytest

from lam import methods

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("aninfonce", {"concentration": -1.0}, "concentration must be positive and finite, got -1"),
    ("aninfonce", {"n_members": 0}, "n_members must be at least 1, got 0"),
    ("aninfonce", {"n_members": 2, "crop_scales": (0.5,)}, "crop_scales must hold 2 scales, .* got 1"),
    ("aninfonce", {"crop_scales": (0.5,)}, r"crop_scales need several members, got \(0.5,\) for one"),
    ("aninfonce", {"crop_scales": (1.5,)}, r"crop_scale must be in \(0, 1\]"),
    ("aninfonce", {"negatives": -1.0}, "negatives must be at least 0, got -1"),
    ("aninfonce", {"negatives": 5.0}, "negatives must be below concentration, 5"),
    ("byol", {"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1"),
    ("deep_ensemble", {"n_members": 1}, "n_members must be at least 2, got 1"),
    ("deep_ensemble", {"reference": 0}, "reference must be at least 2, got 0"),
    ("deep_ensemble", {"checkpoints": ["a.pth", "b.pth"]}, "one file for each of n_members=5 members, got 2"),
    ("elk", {"hidden": 0}, "hidden must be at least 1, got 0"),
    ("hib", {"n_samples": 0}, "n_samples must be at least 1, got 0"),
    ("hib", {"kl_weight": -1.0}, "kl_weight must be at least 0, got -1.0"),
    ("hib", {"scale": 0.0}, "scale must be positive and finite, got 0.0"),
    ("hib", {"offset": float("nan")}, "offset must be finite, got nan"),
    ("hib_vmf", {"epochs": 0}, "epochs must be at least 1, got 0"),
    ("knn_distance", {"k": 0}, "k must be at least 1, got 0"),
    ("knn_distance", {"reference": 4}, "reference must be at least k = 5 items, got 4"),
    ("laplace_online", {"memory_factor": 1.0}, r"memory_factor must lie in \(0, 1\), got 1.0"),
    ("laplace_online", {"memory_factor": 0.0}, "got 0.0"),
    ("laplace_online", {"likelihood_scale": -1.0}, "likelihood_scale must be positive and finite, got -1.0"),
    ("laplace_online", {"initial_precision": 0.0}, "initial_precision must be positive"),
    ("laplace_online", {"n_samples": 0}, "n_samples must be at least 1"),
    ("laplace_online", {"refresh_every": 0}, "refresh_every must be at least 1"),
    ("laplace_online", {"warmup_epochs": -1}, "warmup_epochs must be at least 0"),
    ("laplace_online", {"negative_weight": 2.0}, "negative_weight must be in"),
    ("laplace_posthoc", {"tune_step": 0.1}, "tune_step needs tune='marginal_likelihood', got tune='calibration'"),
    ("laplace_posthoc", {"tune": "marginal_likelihood", "tune_step": 0.0}, "tune_step must be positive and finite"),
    ("laplace_posthoc", {"layers": "all", "structure": "ekfac"}, "^structure must be one of diag, kron, got 'ekfac'"),
    ("laplace_posthoc", {"predictive": "linearised"}, "^predictive needs several layers"),
    ("laplace_posthoc", {"layers": "all", "fix": "full"}, "^layers other than the last cannot hold cross terms"),
    ("laplace_posthoc", {"layers": ["head"], "pairs": "dataset"}, r"^layers=\['head'\] take pairs within batches"),
    ("loss_prediction", {"temperature": 0.0}, "temperature must be positive and finite, got 0"),
    ("mcinfonce", {"kappa_pos": 0.0}, "kappa_pos must be positive and finite, got 0"),
    ("mcinfonce", {"n_samples": 0}, "n_samples must be at least 1, got 0"),
    ("mcinfonce", {"start": 1.0}, "start must be above 1, the least κ of the form exp, got 1"),
    ("pfe", {"epochs": 0}, "epochs must be at least 1, got 0"),
    ("pfe", {"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
    ("simclr", {"weight": 0.0}, "weight must be positive and finite, got 0"),
    ("simclr", {"crop_scale": 2.0}, r"crop_scale must be in \(0, 1\]"),
    ("simclr", {"jitter": 1.0}, r"jitter must be in \[0, 1\), got 1"),
    ("simclr", {"noise": -0.1}, "noise must be at least 0, got -0.1"),
    ("simsiam", {"predictor": 0}, "predictor must be at least 1, got 0"),
    ("simsiam", {"weight": -1.0, "kappa": "none"}, "weight must be positive and finite, got -1"),
    ("swav", {"n_prototypes": 1}, "n_prototypes must be at least 2, got 1"),
    ("swav", {"crop_scale": 0.0}, r"crop_scale must be in \(0, 1\]"),
    ("varcon", {"epsilon": 0.2}, "epsilon must lie within ±temperature, 0.1, got 0.2"),
]


@pytest.mark.parametrize(("method", "options", "message"), REFUSED)
def test_an_option_outside_its_range_is_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.find(method)(**options)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("name", ["prior_precision", "likelihood_scale"])
def test_online_training_needs_a_scale_and_a_prior(name: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive and finite in online training, got None"):
        methods.LaplaceOnline(**{name: None})
