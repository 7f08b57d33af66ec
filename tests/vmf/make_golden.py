"""Writes tests/vmf/golden.json: von Mises-Fisher quantities to 20 digits, from mpmath with 60 digits.

For kappa up to 3e4, I_v is a sum of its power series; beyond, it comes from Hankel's expansion with guard digits.
Neither shares a step with `lam.vmf.bessel`. The caps come from quadrature of the density of the polar angle.

Run: python tests/vmf/make_golden.py
"""

import json
from pathlib import Path

import mpmath as mp

DIMENSIONS = [2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096]
KAPPAS = [float(f"{digit}e{exponent}") for exponent in range(-6, 9) for digit in ("1", "3.1622776601683795")][:-1]
CAP_KAPPAS = KAPPAS[::4]
CAP_LEVELS = [0.05, 0.5, 0.95, 0.999]
SERIES_UP_TO = 3.2e4


def log_scaled_bessel(order: mp.mpf, kappa: mp.mpf) -> mp.mpf:
    """log(I_order(kappa) exp(-kappa) kappa^-order)."""
    if kappa > SERIES_UP_TO:
        return mp.log(hankel_sum(order, kappa)) - mp.log(2 * mp.pi * kappa) / 2 - order * mp.log(kappa)
    quarter, term, total, k = kappa * kappa / 4, mp.mpf(1), mp.mpf(1), 0
    while term > total * mp.eps:
        k += 1
        term *= quarter / (k * (k + order))
        total += term
    return mp.log(total) - order * mp.log(2) - mp.loggamma(order + 1) - kappa


def hankel_sum(order: mp.mpf, kappa: mp.mpf) -> mp.mpf:
    """sum_k (-1)^k a_k(order) / kappa^k; the error is of the order of exp(-2 kappa)."""
    term, total, k = mp.mpf(1), mp.mpf(1), 0
    while abs(term) > mp.eps:
        k += 1
        term *= -(4 * order**2 - (2 * k - 1) ** 2) / (8 * k * kappa)
        total += term
    return total


def cell(dimension: int, kappa: float) -> dict[str, str]:
    order, k = mp.mpf(dimension) / 2 - 1, mp.mpf(kappa)
    low, high = log_scaled_bessel(order, k), log_scaled_bessel(order + 1, k)
    ratio = k * mp.exp(high - low)
    scaled = -mp.mpf(dimension) / 2 * mp.log(2 * mp.pi) - low
    return {
        "ratio": ratio,
        "complement": 1 - ratio,
        "derivative": 1 - ratio**2 - (dimension - 1) * ratio / k,
        "log_normalizer": scaled - k,
        "log_normalizer_scaled": scaled,
        "entropy": k * (1 - ratio) - scaled,
    }


def caps(dimension: int, kappa: float) -> list[mp.mpf]:
    """One minus the cosine of the caps that enclose CAP_LEVELS, by bisection and Newton on the enclosed probability."""
    n, k = dimension - 2, mp.mpf(kappa)
    mode = mp.acos(2 * k / (n + mp.sqrt(n * n + 4 * k * k)))
    width = 1 / mp.sqrt((n / mp.sin(mode) ** 2 if n else 0) + k * mp.cos(mode))
    low, high = max(mp.mpf(0), mode - 16 * width), min(mp.pi, mode + 16 * width)

    def density(angle: mp.mpf) -> mp.mpf:
        swing = 2 * k * mp.sin((angle - mode) / 2) * mp.sin((angle + mode) / 2)
        return (mp.sin(angle) / mp.sin(mode)) ** n * mp.exp(-swing) if n else mp.exp(-swing)

    def integral(a: mp.mpf, b: mp.mpf) -> mp.mpf:
        points = mp.linspace(a, b, 9)
        return mp.quad(density, points, method="gauss-legendre", maxdegree=4)

    total = integral(low, high)
    answers = []
    for level in CAP_LEVELS:
        a, b, angle = low, high, mode
        for _ in range(60):
            excess = integral(low, angle) / total - mp.mpf(level)
            a, b = (a, angle) if excess > 0 else (angle, b)
            step = excess * total / density(angle)
            if abs(step) < mp.mpf(10) ** -22 * angle:
                break
            angle = angle - step if a < angle - step < b else (a + b) / 2
        answers.append(2 * mp.sin(angle / 2) ** 2)
    return answers


def main() -> None:
    mp.mp.dps = 160
    cells = [cell(dimension, kappa) for dimension in DIMENSIONS for kappa in KAPPAS]
    mp.mp.dps = 28
    golden = {
        "dimensions": DIMENSIONS,
        "kappas": KAPPAS,
        **{name: [mp.nstr(values[name], 20) for values in cells] for name in cells[0]},
        "cap_kappas": CAP_KAPPAS,
        "cap_levels": CAP_LEVELS,
        "cap": [mp.nstr(v, 17) for d in DIMENSIONS for kappa in CAP_KAPPAS for v in caps(d, kappa)],
    }
    path = Path(__file__).parent / "golden.json"
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
