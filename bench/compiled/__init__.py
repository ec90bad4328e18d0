"""Kernels compiled ahead of time, without a GPU: the driver, the committed tables, calls for a race detector."""
