"""Ratio A_D of modified Bessel functions I, and normaliser C_D of the von Mises-Fisher density.

The functions have nearly full float64 precision for any dimension D >= 2 and finite kappa >= 0. An expansion of log I
gives the values at an order of at least 20. From there, backward recursion goes down to the order for D. Up to
kappa = 1e8, no step subtracts two large numbers.
"""

import math
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.polynomial.polynomial import polyadd, polyder, polymul
from torch import Tensor

from lam.utils.checks import check_positive, check_tensor, unit_tolerance

_TERMS = 12
_POWERS = 6  # powers of p in a block of Horner's rule; the expansion has 3 * _TERMS powers
_MINIMAL_ORDER = 20  # from this order on, `_TERMS` terms have errors below rounding
_LEAST = 1e-300  # a smaller R or kappa counts as 0: products underflow in float64
_SLACK = 1e-4  # tolerance of checks on R and 1 - R; more for half precision, which rounds more
_INTERVALS = 256  # intervals of R in a table
_TABLES: dict[int, np.ndarray] = {}
"""Tables of `_corrections` by dimension, computed before tracing, because traced tensors have no values."""


def bessel_ratio(dimension: int, kappa: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """Mean resultant length of the von Mises-Fisher distribution, differentiable in kappa.

    A_D(kappa) = I_{D/2}(kappa) / I_{D/2-1}(kappa) rises from 0 at kappa = 0 towards 1.

    Source: Sra (2012), "A short note on parameter approximation for von Mises-Fisher distributions", equation 3.

    Args:
        dimension: D >= 2, the dimension of the space that holds the sphere.
        kappa: concentrations, finite and at least 0, of any float type; computed in float64.

    Returns:
        A_D in [0, 1), shape and type of `kappa`.

    Raises:
        ValueError: if `dimension` is below 2, or a `kappa` is negative or not finite.

    Example:
        >>> bessel_ratio(3, torch.tensor([0.0, 1.0], dtype=torch.float64))  # 1 / tanh(kappa) - 1 / kappa
        tensor([0.0000, 0.3130], dtype=torch.float64)
    """
    return _computed("ratio", dimension, kappa)


def bessel_ratio_complement(dimension: int, kappa: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """1 - A_D(kappa), differentiable in kappa, with full relative precision even where A_D is near 1.

    For large kappa, 1 - A_D is about (D - 1) / (2 kappa).

    Args, Raises, shape and type of the result: as `bessel_ratio`.

    Example:
        >>> bessel_ratio_complement(3, torch.tensor(1e8))
        tensor(1.0000e-08)
    """
    return _computed("complement", dimension, kappa)


def bessel_ratio_derivative(dimension: int, kappa: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """Derivative A_D'(kappa), the variance of the cosine between a draw and the mean direction; not differentiable.

    A_D' = 1 - A_D^2 - (D - 1) A_D / kappa (Sra 2012, equation 4). This formula loses digits for large kappa; a
    recursion replaces it.
    """
    return _computed("derivative", dimension, kappa)


def log_normalizer(dimension: int, kappa: Float[Tensor, "*B"], *, scaled: bool = False) -> Float[Tensor, "*B"]:
    """Log normaliser log C_D of the density C_D(kappa) exp(kappa mu.x), twice differentiable in kappa.

    log C_D = (D/2 - 1) log kappa - (D/2) log(2 pi) - log I_{D/2-1}(kappa). At kappa = 0, log C_D is minus the log of
    the sphere's area. The derivative of log C_D is -A_D.

    Source: Mardia and Jupp (2000), "Directional Statistics", equation 9.3.4.

    With `scaled`, the result is log C_D + kappa, the log density at the mean direction, without cancellation.

    Args, Raises, shape and type of the result: as `bessel_ratio`.

    Example:
        >>> log_normalizer(3, torch.tensor(0.0)).exp()  # 1 / (4 pi)
        tensor(0.0796)
    """
    return _computed("log_normalizer_scaled" if scaled else "log_normalizer", dimension, kappa)


def kappa_from_resultant(
    resultant: Float[Tensor, "*B"],
    dimension: int,
    *,
    one_minus_resultant: Float[Tensor, "*B"] | None = None,
    max_kappa: float = 1e8,
) -> Float[Tensor, "*B"]:
    """Concentration kappa for a mean resultant length R: the inverse of `bessel_ratio`.

    The solution has full precision; programs of `BayesianEncoder.export` may have errors of 1e-8.

    Source: Sra (2012), equation 4, by Halley's method from the start in equation 4.4 of Banerjee et al. (2005).

    Args:
        resultant: mean resultant lengths R in [-1, 1]. Unbiased estimates can be 0 or negative; kappa is then 0.
        dimension: D >= 2.
        one_minus_resultant: 1 - R, if it is known more precisely than R. Near R = 1, kappa is about
            (D - 1) / (2 (1 - R)), and 1 - R has few correct digits if R is float32.
        max_kappa: greatest kappa; the result for R = 1.

    Returns:
        kappa in [0, max_kappa], detached, with the shape of `resultant`, rounded to its type (float16: at most 65504).

    Raises:
        ValueError: for a resultant that is an integer, NaN or outside [-1, 1], a `one_minus_resultant` that is not
            1 - R, a `dimension` below 2, or a `max_kappa` that is not positive and finite.

    Example:
        >>> kappa_from_resultant(torch.tensor([0.0, 0.5, 1.0]), 3)
        tensor([0.0000e+00, 1.7968e+00, 1.0000e+08])
    """
    check_dimension(dimension)
    check_floating(resultant=resultant)
    check_positive("max_kappa", max_kappa)
    check_all(resultant.abs() <= 1 + _SLACK, "resultant must lie in [-1, 1]", resultant)
    max_kappa = min(max_kappa, torch.finfo(resultant.dtype).max)
    length = resultant.detach().double()
    complement = 1 - length
    if one_minus_resultant is not None:
        slack = max(unit_tolerance(part.dtype, least=_SLACK) for part in (resultant, one_minus_resultant))
        adds_up = (one_minus_resultant - complement).abs() <= slack
        check_all(adds_up, "one_minus_resultant must be 1 - resultant", one_minus_resultant)
        complement = one_minus_resultant.detach().double()
    length, complement = length.clamp(0, 1), complement.clamp(0, 1)
    if torch.compiler.is_exporting() and dimension in _TABLES and _recursion_steps(dimension) > 0:
        start, n_steps = _start_by_table(dimension, length, complement), 0
    elif torch.compiler.is_compiling():
        start, n_steps = _start(dimension, length, complement), 2
    else:
        start, n_steps = _start_by_table(dimension, length, complement), 1
    return _solve(dimension, length, complement, max_kappa, start, n_steps).to(resultant.dtype)


def tabulate_for_export(dimension: int) -> None:
    """Compute the table with which exported graphs invert `bessel_ratio` to 1e-8; only for a dimension below 42.

    Without the table, the graph unrolls two steps of Halley's method, each with up to 20 steps of backward recursion.
    This takes hundreds of nodes and seconds of export. The table takes about twenty nodes.
    """
    if _recursion_steps(dimension) > 0:
        _corrections(dimension)


def check_dimension(dimension: int) -> None:
    """Reject a dimension below two."""
    if dimension < 2:
        raise ValueError(f"dimension must be at least 2, got {dimension}")


def check_parameters(dimension: int, kappa: Float[Tensor, "*B"], name: str = "kappa") -> None:
    """Reject a dimension below two, and concentrations that are negative, not finite or of an integer type."""
    check_dimension(dimension)
    check_floating(**{name: kappa})
    check_all((kappa >= 0) & torch.isfinite(kappa), f"{name} must be finite and at least 0", kappa)


def check_floating(**tensors: Tensor) -> None:
    """Reject integer tensors: results have the type of the arguments, so an integer type would truncate results."""
    for name, values in tensors.items():
        check_tensor(name, values)
        if not values.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point type, got {values.dtype}")


def check_all(valid: Bool[Tensor, "*B"], rule: str, values: Float[Tensor, "*B"]) -> None:
    """Raise a `ValueError` with the rule and the first invalid value, unless all values are valid."""
    if torch.compiler.is_exporting():  # tracing cannot branch on values
        return
    valid, values = map(torch.func.debug_unwrap, (valid, values))  # all values, even of one item under vmap
    if valid.all():
        return
    index = tuple((~valid).nonzero()[0].tolist())
    place = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    raise ValueError(f"{rule}, got {values[index].item()}{place}")


def _computed(name: str, dimension: int, kappa: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """The function of this name in `_DERIVATIVES`, or "derivative", computed in float64; shape and type of `kappa`."""
    check_parameters(dimension, kappa)
    return _Function.apply(kappa.double(), dimension, name).to(kappa.dtype)


class _Bessel(NamedTuple):
    ratio: Tensor
    complement: Tensor
    derivative: Tensor
    log_normalizer_scaled: Any  # a tensor, or None


def _evaluate(dimension: int, kappa: Tensor, *, normalizer: bool = False) -> _Bessel:
    """A_D, 1 - A_D, A_D' and, with `normalizer`, log C_D + kappa, in float64.

    The recursion starts at order m. With s = sqrt(m^2 + kappa^2), p = m / s, the expansion L(p) and g = 1/2 + p L'(p),

        log I_m = s - m log((m + s) / kappa) - log(2 pi s) / 2 + L
        I_{m+1} / I_m = kappa / (m + s) - g kappa / s^2

    A step down from q = I_{mu+2} / I_{mu+1} is I_{mu+1} / I_mu = kappa / (2 (mu + 1) + kappa q).
    """
    steps = _recursion_steps(dimension)
    order = dimension / 2 - 1 + steps
    hypotenuse = torch.hypot(kappa, kappa.new_tensor(order))
    total = order + hypotenuse
    p, sine = order / hypotenuse, kappa / hypotenuse
    expansion, g, slope = _expansion(order, p)
    ratio = kappa / total - g * sine / hypotenuse
    complement = (order + order * (order / (hypotenuse + kappa))) / total + g * sine / hypotenuse
    derivative = p / total - ((2 * p * p - 1) * g - sine * sine * slope) / hypotenuse / hypotenuse
    product = torch.ones_like(kappa) if normalizer else None
    for step in reversed(range(steps)):
        twice = dimension + 2 * step
        inverse = 1 / (twice + kappa * ratio)
        ratio = kappa * inverse
        complement = (twice - kappa * complement) * inverse
        derivative = (twice * inverse - ratio * (kappa * derivative)) * inverse
        product = None if product is None else product * (total * inverse)
    if product is None:
        return _Bessel(ratio, complement, derivative, None)
    log_normalizer_scaled = (
        (dimension / 2 - 1) * total.log()
        - order * (order / (hypotenuse + kappa))
        + 0.5 * hypotenuse.log()
        - expansion
        + product.log()
        - (dimension - 1) / 2 * math.log(2 * math.pi)
    )
    return _Bessel(ratio, complement, derivative, log_normalizer_scaled)


def _solve(dimension: int, length: Tensor, complement: Tensor, max_kappa: float, kappa: Tensor, n_steps: int) -> Tensor:
    """Solution of A(kappa) = R by `n_steps` of Halley's method from `kappa`; `step` is relative to kappa.

    The error is A - R for R < 1/2; for larger R, (1 - R) - (1 - A) is more precise. `bend` is kappa A'' / A' =
    (D - 1) (A / (kappa A') - 1) - 2 kappa A, from A' = 1 - A^2 - (D - 1) A / kappa.
    """
    for _ in range(n_steps):
        kappa = kappa.clamp(_LEAST, max_kappa)
        bessel = _evaluate(dimension, kappa)
        slope = kappa * bessel.derivative
        step = torch.where(length < 0.5, bessel.ratio - length, complement - bessel.complement) / slope
        bend = (dimension - 1) * (bessel.ratio / slope - 1) - 2 * kappa * bessel.ratio
        kappa = kappa - kappa * step / (1 - 0.5 * step * bend).clamp(min=0.5)  # below 0.5 only far from the solution
    return torch.where(length < _LEAST, 0.0, kappa).clamp(0, max_kappa)


def _recursion_steps(dimension: int) -> int:
    return max(0, _MINIMAL_ORDER + 1 - dimension // 2)


def _start(dimension: int, length: Tensor, complement: Tensor) -> Tensor:
    """Approximate concentration for a resultant length R, exact in the limits R = 0 and R = 1."""
    return length * (dimension - length.square()) / (complement * (1 + length))


def _corrections(dimension: int) -> np.ndarray:
    """Cubics that approximate kappa / `_start` in each interval of R: (_INTERVALS, 4), lowest power first."""
    if dimension in _TABLES:
        return _TABLES[dimension]
    lengths = torch.linspace(0, 1, 3 * _INTERVALS + 1, dtype=torch.float64)
    inner = lengths[1:-1]
    ratio = torch.ones_like(lengths)
    start = _start(dimension, inner, 1 - inner)
    ratio[1:-1] = _solve(dimension, inner, 1 - inner, math.inf, start, 2) / start
    values = torch.stack([ratio[place : place + 3 * _INTERVALS : 3] for place in range(4)])
    table = np.linalg.solve(
        np.vander(np.arange(4) / 3, increasing=True), torch.func.debug_unwrap(values).numpy()
    ).T.copy()
    return _TABLES.setdefault(dimension, table)


def _start_by_table(dimension: int, length: Tensor, complement: Tensor) -> Tensor:
    """Concentration with a relative error of 1e-8: `_start` times a correction from the table."""
    table = torch.from_numpy(_corrections(dimension)).to(length.device)
    place = (length * _INTERVALS).floor().clamp(0, _INTERVALS - 1)
    t = length * _INTERVALS - place
    c0, c1, c2, c3 = table[place.long()].unbind(-1)
    return _start(dimension, length, complement) * (((c3 * t + c2) * t + c1) * t + c0)


def _expansion(order: float, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L(p), 1/2 + p L'(p) and p (p L'(p))', by Horner's rule in p^6 with polynomials in p as coefficients."""
    table = torch.tensor(_expansion_coefficients(order), dtype=p.dtype, device=p.device)
    powers = p.expand(_POWERS, *p.shape).cumprod(0)
    blocks, highest = torch.tensordot(table, powers, 1).unbind(), powers[-1]
    value, first, second = reduce(lambda above, block: torch.addcmul(block, above, highest), blocks).unbind()
    return value, first + 0.5, second


@lru_cache(maxsize=64)
def _expansion_coefficients(order: float) -> np.ndarray:
    """Coefficients c, n c and n^2 c of each power p^n in L(p) = sum_k D_k(p) / order^k.

    The array has shape (blocks, 3, _POWERS), with the block of the highest powers first.
    """
    m = Fraction(order)
    total = reduce(polyadd, (E_k / m**k for k, E_k in enumerate(_expansion_derivatives(), start=1)))
    rounded = [float(c / power) for power, c in enumerate(total, start=1)]
    columns = np.array([(c, power * c, power**2 * c) for power, c in enumerate(rounded, start=1)])
    return columns.reshape(-1, _POWERS, 3).swapaxes(1, 2)[::-1].copy()


@lru_cache(maxsize=1)
def _expansion_derivatives() -> list[np.ndarray]:
    """Exact polynomials E_k = D_k' (lowest power first) of the uniform expansion of log I.

    Olver's polynomials u_k(p) obey u_{k+1}' = (q u_k')' / 2 + (1 - 5 p^2) u_k / 8 with q = p^2 (1 - p^2). Hence the
    logarithm of their sum has E_1 = (1 - 5 p^2) / 8 and E_{k+1} = ((q E_k)' + q sum_{i+j=k} E_i E_j) / 2.

    Source: Olver (1954), "The asymptotic expansion of Bessel functions of large order", section 4; DLMF 10.41.9.
    """
    q = np.array([Fraction(c) for c in (0, 0, 1, 0, -1)])
    terms = [np.array([Fraction(1, 8), Fraction(0), Fraction(-5, 8)])]
    while len(terms) < _TERMS:
        products: Any = sum(map(polymul, terms[:-1], terms[-2::-1]))
        terms.append(polyadd(polyder(polymul(q, terms[-1])), polymul(q, products)) / 2)
    return terms


_DERIVATIVES = {
    **{"ratio": (1, "derivative"), "complement": (-1, "derivative")},
    **{"log_normalizer": (-1, "ratio"), "log_normalizer_scaled": (1, "complement")},
}
"""Derivative of each function in kappa: a sign, and the function."""


class _Function(torch.autograd.Function):
    """A field of `_Bessel`, or log C_D. A_D' has no derivative here: an error replaces autograd's silent zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kappa: Tensor, dimension: int, name: str) -> Tensor:
        bessel = _evaluate(dimension, kappa, normalizer=name.startswith("log"))
        return bessel.log_normalizer_scaled - kappa if name == "log_normalizer" else getattr(bessel, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        kappa, ctx.dimension, ctx.name = inputs
        ctx.save_for_backward(kappa)
        ctx.save_for_forward(kappa)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (kappa,) = grad_outputs, ctx.saved_tensors
        if ctx.name == "derivative":  # in closed form its terms cancel: the relative error is κ times the rounding
            raise NotImplementedError(
                "the second derivative of the Bessel ratio is not available; detach the first one"
            )
        sign, name = _DERIVATIVES[ctx.name]
        return grad * (sign * _Function.apply(kappa, ctx.dimension, name)), None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        return _Function.backward(ctx, grad_inputs[0])[0]
