"""Triton kernels that move and read a paged KV cache through its block tables."""
