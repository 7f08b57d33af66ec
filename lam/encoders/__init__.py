"""Encoders: a network and its uncertainty, to be saved, loaded, evaluated and served. `lam.methods` trains them."""

from lam.encoders.base import Encoder, Prediction
from lam.encoders.bayesian import BayesianEncoder

__all__ = ["BayesianEncoder", "Encoder", "Prediction"]
