"""Laws of an encoder that hold for every structure of its posterior."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lam
from lam.hessians import ContrastiveCurvature, Diagonal, Full, Kron, LowRank
from lam.methods import LaplacePosthoc
from lam.posteriors import POSTERIORS
from tests.encoders.small import WIDE, fit, make_batches, make_network, same_posterior
from tests.evaluation.test_evaluate import METRICS
from tests.helpers import unchecked

BASES = ("ekfac",)
"""Structures in a basis that depends on the data, so two fits cannot be added."""


@pytest.fixture(params=POSTERIORS)
def structure(request: pytest.FixtureRequest) -> str:
    return request.param


def options_of(structure: str) -> dict[str, Any]:
    return {"structure": structure, **({"rank": 4} if structure == "low_rank" else {})}


def test_fit_puts_the_posterior_into_the_structure(structure: str):
    batches = make_batches()
    encoder = fit(batches, **options_of(structure))
    assert type(encoder.posterior) is POSTERIORS[structure]
    assert encoder.posterior.curvature.counts == fit(batches).posterior.curvature.counts
    assert encoder.posterior.n_items == 64
    assert encoder.embed(batches).kappa.isfinite().all()


@pytest.mark.parametrize("scope", ["batch", "dataset"])
def test_batches_of_one_loader_and_a_whole_data_set_are_fitted_alike(structure: str, scope: Any):
    inputs, labels = make_batches(1, N=40)[0]
    whole = fit([(inputs, labels)], pairs=scope, **options_of(structure))
    features = whole.features(inputs)
    weight, bias = whole.posterior.weight, whole.posterior.bias
    alone = lam.fit_features(features, labels, weight, bias, lam.Laplace(margin=0.7, **options_of(structure)))
    for name, sums in whole.posterior.curvature.tensors().items():
        expected = alone.posterior.curvature.tensors()[name]
        if not name.endswith("_basis"):
            torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(
        alone.posterior.output_spread()(features).variance,
        whole.posterior.output_spread()(features).variance,
        rtol=1e-3,
        atol=1e-5,
    )


def test_a_posterior_without_a_name_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    encoder = fit(make_batches(), structure="diag")
    monkeypatch.setattr(type(encoder), "posteriors", {})
    with pytest.raises(ValueError, match=r"DiagonalPosterior.*lam.posteriors.POSTERIORS\['mine'\]"):
        encoder.save(tmp_path)


@pytest.mark.long
def test_it_is_tuned_saved_and_loaded(structure: str, tmp_path: Path):
    batches = make_batches()
    encoder = fit(batches, **options_of(structure))
    encoder.tune(batches, by="marginal_likelihood")
    encoder.tune(make_batches(2, seed=1), least=1e-3, greatest=1e6, refinements=1)
    encoder.save(tmp_path)
    loaded = lam.load(tmp_path, make_network())
    assert same_posterior(loaded, encoder)
    assert type(loaded.posterior) is POSTERIORS[structure]
    torch.testing.assert_close(loaded.embed(batches).kappa, encoder.embed(batches).kappa, rtol=1e-5, atol=0)
    diagnostics = loaded.diagnostics(loaded.features(batches))
    assert {"share_clipped", "variance_clipped"} < diagnostics.keys() <= METRICS.keys()
    assert ("share_left" in diagnostics) == (structure == "low_rank")


def test_it_forgets_batches_and_adds_others(structure: str):
    batches = make_batches(6)
    whole, first, second = (fit(part, **options_of(structure)) for part in (batches, batches[:3], batches[3:]))
    whole.forget(batches[3:])
    assert whole.posterior.n_items == first.posterior.n_items
    variance = whole.posterior.output_spread()(whole.features(batches)).variance
    if structure in BASES:
        assert whole.posterior.curvature.counts == first.posterior.curvature.counts
        with pytest.raises(ValueError, match="Ekfacs.*same output_basis"):
            _ = first + second
        return
    features = first.features(batches)
    torch.testing.assert_close(variance, first.posterior.output_spread()(features).variance, rtol=1e-3, atol=1e-6)
    joined, everything = first + second, fit(batches, **options_of(structure))
    expected = everything.posterior.output_spread()(features).variance
    torch.testing.assert_close(joined.posterior.output_spread()(features).variance, expected, rtol=1e-4, atol=1e-6)


def test_a_fit_does_not_depend_on_the_default_type(structure: str):
    network, batches, expected = make_network(), make_batches(), fit(**options_of(structure)).posterior.tensors()
    torch.set_default_dtype(torch.float64)
    try:
        encoder = lam.fit(network, batches, lam.Laplace(margin=0.7, **options_of(structure)), progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in encoder.posterior.tensors().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.long
def test_it_is_exported(structure: str, tmp_path: Path):
    encoder, inputs = fit(D=WIDE, **options_of(structure)), make_batches(1)[0][0]
    encoder.export(tmp_path / "encoder.pt2", inputs)
    program = torch.export.load(tmp_path / "encoder.pt2").module()
    for N in (2, 7):
        _, mean, kappa, variance = program(inputs[:N])
        expected = encoder.embed(inputs[:N])
        torch.testing.assert_close(mean, expected.mean)
        torch.testing.assert_close(kappa, expected.kappa, rtol=1e-4, atol=0)
        torch.testing.assert_close(variance, expected.variance, rtol=1e-4, atol=0)


def test_another_structure_is_refused_and_those_there_are_listed():
    with pytest.raises(ValueError, match="structure.*diag, kron, ekfac, full, low_rank.*'diagonal'"):
        fit(structure="diagonal")
    with pytest.raises(ValueError, match="structure.*diag, kron"):
        LaplacePosthoc(structure="kronecker")


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full", "low_rank"])
def test_cross_terms_are_refused_with_what_is_allowed(structure: str):
    with pytest.raises(ValueError, match=f'structure="{structure}".*cross terms.*fix="fixed"'):
        fit(structure=structure, curvature=ContrastiveCurvature(0.7, fix="positive"))
    with pytest.raises(ValueError, match=f'structure="{structure}".*cross terms'):
        LaplacePosthoc(structure=structure, fix="full")


def test_a_layer_that_does_not_fit_is_refused_with_its_bytes():
    needed = Full.n_bytes(2, 3, 13)
    with pytest.raises(ValueError, match=f"3 x 13 weights.*{needed:,} bytes.*max_memory, 1,000"):
        fit(structure="full", max_memory=1000)
    fit(structure="full", max_memory=needed)
    least = Kron.n_bytes(2, 3, 13)
    with pytest.raises(ValueError, match=rf'structure="ekfac" .* more than max_memory, {least:,}: allow'):
        fit(structure="ekfac", max_memory=least)
    smaller = LowRank.n_bytes(2, 3, 13), Diagonal.n_bytes(2, 3, 13)
    assert smaller[1] < least < smaller[0]
    for memory, advice in (
        (least - 1, ', or use structure="diag"'),
        (smaller[0], ', or use structure="low_rank" or "diag"'),
        (smaller[1] - 1, ""),
    ):
        with pytest.raises(ValueError, match=f"allow more{advice}$"):
            fit(structure="full", max_memory=memory)
    with pytest.raises(ValueError, match="max_memory.*1, got 0"):
        fit(max_memory=0)


def test_a_rank_is_that_of_a_low_rank():
    with pytest.raises(ValueError, match='structure="low_rank" only, got 8 with'):
        fit(structure="kron", rank=8)
    with pytest.raises(ValueError, match="rank.*1, got 0"):
        LaplacePosthoc(structure="low_rank", rank=0)


@pytest.mark.parametrize("prior", [0.0, float("nan")])
def test_without_a_prior_no_factor_may_be_singular(structure: str, prior: float):
    with pytest.raises(ValueError, match="prior_precision.*positive"):
        fit(prior_precision=prior, **options_of(structure))


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"structure": "kron"}, {"structure": "diag"}, r"Krons.*Kron\(.*\) and Diagonal\("),
        ({"structure": "ekfac"}, {"structure": "ekfac"}, 'fit.*structure="kron"'),
        (
            {"structure": "low_rank", "rank": 2},
            {"structure": "low_rank", "rank": 3},
            r"same probes.*\(13, 2\) and \(13, 3\).*rank",
        ),
    ],
)
def test_what_does_not_add_up_says_why(one: dict[str, Any], other: dict[str, Any], message: str):
    batches = make_batches()
    with pytest.raises(ValueError, match=message):
        _ = fit(batches[:2], **one) + fit(batches[2:], **other)


def test_a_saved_kron_keeps_its_eigenvectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    batches, wide = make_batches(), 12 + 1
    encoder = fit(batches, structure="kron")
    encoder.save(tmp_path)
    sizes: list[int] = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (sizes.append(len(matrix)), eigh(matrix))[1])
    loaded = lam.load(tmp_path, make_network()).to("cpu:0")  # another name of the device, so tensors are moved
    assert torch.equal(loaded.embed(batches).kappa, encoder.embed(batches).kappa)
    assert wide not in sizes
    more = fit(make_batches(seed=1), structure="kron")
    assert isinstance(loaded, lam.BayesianEncoder)
    both = loaded.posterior + more.posterior
    expected = (encoder.posterior + more.posterior).predict(encoder.features(batches)).kappa
    assert torch.equal(both.predict(encoder.features(batches)).kappa, expected)
    assert wide in sizes


def test_eigenvectors_of_other_inputs_are_refused():
    kron, other = (fit(make_batches(seed=seed), structure="kron").posterior.curvature for seed in (0, 1))
    values, vectors = kron.input_eigen
    assert torch.equal(kron.with_input_eigen(values, vectors.float()).spectrum, kron.spectrum)
    for wrong in (other.input_eigen, (values, vectors * torch.nan), (values * 1.001, vectors)):
        with pytest.raises(ValueError, match="other inputs"):
            kron.with_input_eigen(*wrong)
    with pytest.raises(ValueError, match=r"\(13, 13\)"):
        unchecked(Kron.with_input_eigen)(kron, values, vectors[:, :5])
