"""Weights of one layout turned into those of another, as a plan of `common.layouts` says."""
