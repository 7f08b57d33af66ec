"""Encoders: networks that embed with uncertainty. `lam.methods` trains them."""

from lam.encoders.base import Encoder, Prediction
from lam.encoders.bayesian import BayesianEncoder

__all__ = ["BayesianEncoder", "Encoder", "Prediction"]
