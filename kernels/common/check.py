"""Argument checks of the kernel launchers: every error names the argument, what was expected and what came.

What is checked is what the host knows: types, shapes, strides, devices and numbers. The values of a tensor are looked
at on the CPU only; on a GPU that would stop it until all earlier work is done.

No launcher asks for more of a stride than 1 in the last dimension. No kernel uses TMA, and whether rows are read by
16-byte copies Triton decides at each launch, from the pointers and strides that it is given: rows whose stride is no
multiple of 16 elements are read right, by narrower copies, and far slower where the tiles were chosen for wide ones
(docs/kernels/skinny_linear.md).
"""

from collections.abc import Sequence

import torch

from specdec.kernels.common.limits import MAX_NODES

__all__ = ["FLOAT_DTYPES", "MAX_NODES", "check_num_nodes", "check_parent", "check_tensor"]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of models, their states and logits."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous_last: bool = True,
) -> None:
    """Check one tensor argument.

    Args:
        name: name of the argument, for the message.
        tensor: the value that came.
        shape: expected sizes; None for a dimension of any size.
        dtype: expected dtype, or the dtypes to choose from.
        device: device that the other arguments are on.
        contiguous_last: the last dimension must have stride 1.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: another shape, device or stride.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    # this runs for every argument of every op of every layer: the way through without an error is kept short
    if dtype is not None and tensor.dtype is not dtype:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        if tensor.dtype not in allowed:
            raise TypeError(f"{name}: expected {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    sizes = tensor.shape
    if shape is not None and sizes != shape:
        fits = len(sizes) == len(shape)
        for want, got in zip(shape, sizes, strict=False):
            fits = fits and (want is None or want == got)
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name}: expected shape [{wanted}], got {list(sizes)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got {tensor.device}")
    if contiguous_last and sizes and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {tensor.stride(-1)}")


def check_num_nodes(name: str, num_nodes: int) -> None:
    """Check the number of nodes of a tree, root included.

    Args:
        name: name of the argument that has it, for the message.
        num_nodes: the number that came.

    Raises:
        ValueError: no node, or more than `MAX_NODES`.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{name}: expected 1 to {MAX_NODES} nodes, root included, got {num_nodes}")


def check_parent(parent: torch.Tensor, *, pool_size: int | None = None) -> None:
    """Check parents on the CPU; on a GPU they are the caller's duty, and a kernel drops what breaks the rule.

    Args:
        parent: [B or 1, N] integers: -1 for the root and for padding, otherwise an earlier node (parent < child).
        pool_size: the parents are candidates of a pool of this size instead, in any order.

    Raises:
        ValueError: a parent that breaks the rule.
    """
    if parent.device.type != "cpu":
        return
    wrong = (parent < -1) | (parent >= (torch.arange(parent.shape[1]) if pool_size is None else pool_size))
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        allowed = "an earlier node" if pool_size is None else f"a candidate below {pool_size}"
        got = f"{parent[row, place].item()} at place {place} of row {row}"
        raise ValueError(f"parent: expected -1 or {allowed}, got {got}")
