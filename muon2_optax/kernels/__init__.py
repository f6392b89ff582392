"""Kernels for NVIDIA Hopper GPUs, and when programs use them."""
