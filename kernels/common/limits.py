"""Numbers that several modules share; no PyTorch, so that trees can be read without it."""

__all__ = ["MAX_NODES", "NUM_SMS"]

MAX_NODES = 512
"""Most nodes of a tree, root included: kernels that walk a tree hold all of it in the registers of one program."""

NUM_SMS = 132
"""Multiprocessors of an H100 and an H200; on a smaller GPU what fills these runs in more than one wave."""
