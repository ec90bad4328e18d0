"""What kernels share and what is no op of its own: checks, launches, Triton helpers, the walk over a tree."""
