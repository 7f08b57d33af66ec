"""lam makes a retrieval network Bayesian."""

__version__ = "0.1.0"
