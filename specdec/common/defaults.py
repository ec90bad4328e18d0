"""What the code around a call has set for all of torch, and how a call does without it."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

__all__ = ["torch_defaults"]

logger = logging.getLogger(__name__)


@contextmanager
def torch_defaults() -> Iterator[None]:
    """No autocast, and new tensors on the CPU unless a device is named, as if nobody had set otherwise.

    Decoding computes in the dtype of the target's weights, on which exactness and the kernels rest; of an autocast that
    is left out a warning tells, once. Also a decorator: `@torch_defaults()`.
    """
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                _warn_of_autocast()
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@cache
def _warn_of_autocast() -> None:
    logger.warning(
        "specdec decodes in the dtype of the target's weights and leaves torch.autocast out; load the model in the "
        "dtype that it is to decode in"
    )
