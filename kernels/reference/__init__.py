"""Eager references of the kernels: the definitions, not a fast path. They need torch alone."""
