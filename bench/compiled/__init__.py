"""Kernels compiled ahead of time and launches counted, without a GPU: the driver, the committed tables, a race detector."""
