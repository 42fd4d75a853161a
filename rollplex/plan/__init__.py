"""Bytes a GPU by tensor class and phase, from a model's configuration alone. Needs no torch."""
