"""Gaussians over weights: features in, embeddings out. One file a structure."""
