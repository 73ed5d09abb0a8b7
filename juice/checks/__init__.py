"""Proof that a model is steered exactly: at every load, and thoroughly by `juice doctor`."""
