"""Argument checks of the kernel launchers: every error names the argument, what was expected and what came."""

from collections.abc import Sequence

import torch

__all__ = ["check_tensor"]


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
