"""Tensor parallelism of the split model: shards of weights, sharded modules, their collectives."""
