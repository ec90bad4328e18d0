"""Limits that hold on every layer; nothing is imported for them."""

__all__ = ["MAX_NODES"]

MAX_NODES = 512
"""Most nodes of a tree, root included: kernels that walk a tree hold all of it in the registers of one program."""
