"""What is saved, loaded, evaluated and served: a network, and what is known of its uncertainty.

How one comes about is told by `lam.methods`.
"""
