"""What the CUDA driver offers beyond torch: shareable memory, streams on some SMs, MPS."""
