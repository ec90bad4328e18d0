"""What trees and the kernels that read them agree on; no PyTorch, so that trees can be read without it."""

__all__ = ["MAX_NODES"]

MAX_NODES = 512
"""Most nodes of a tree, root included: kernels that walk a tree hold all of it in the registers of one program."""
