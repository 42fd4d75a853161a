"""How a model's tensors lie on tensor-parallel ranks, and which memory two layouts can share."""
