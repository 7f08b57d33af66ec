"""Encoders, saved, loaded, evaluated and served: a network and its uncertainty. Training is in `lam.methods`."""
