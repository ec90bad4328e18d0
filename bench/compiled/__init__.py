"""Kernels compiled ahead of time and launches counted, without a GPU: the driver, tables, calls for a race detector."""
