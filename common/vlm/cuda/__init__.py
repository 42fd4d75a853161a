"""Kernels of the split pass and of decoding for CUDA devices; importing them needs Triton."""
