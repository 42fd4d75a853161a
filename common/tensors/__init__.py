"""Tensors that live in the memory broker: what they are, and how a process holds them."""
