"""Encoders, saved, loaded, evaluated and served: a network and its uncertainty. Training is in `lam.methods`."""

from lam.encoders.base import Encoder, Prediction
from lam.encoders.bayesian import BayesianEncoder

__all__ = ["BayesianEncoder", "Encoder", "Prediction"]
