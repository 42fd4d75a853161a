"""The split forward and backward of Qwen2.5-VL, its model files, and its decode kernels."""
