"""Triton kernels; each equals its torch reference, bit for bit where the contract is bitwise."""
