"""A guard around a step: it raises at whatever a CUDA graph cannot hold, or would make the host wait for the device.

That is: reading a number from a tensor, shapes that depend on data, copies between devices, and data of the host that
becomes a tensor. Seen as operators where PyTorch dispatches them, and as functions where it does not.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels.common.library import as_ops

aten = torch.ops.aten
LOOKS = frozenset({"item", "is_nonzero", "_local_scalar_dense", "equal", "allclose"})
UNIQUE = frozenset({"unique_dim", "_unique", "_unique2", "unique_consecutive"})
FOUND = frozenset({"nonzero", "nonzero_numpy", "argwhere", "masked_select"})
SHAPES_BY_DATA = UNIQUE | FOUND | {"bincount", "repeat_interleave"}
FROM_HOST = frozenset({"lift_fresh", "lift", "pin_memory", "_pin_memory"})
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


class HostError(AssertionError):
    """The step needed the host."""


class Guard(TorchDispatchMode):
    """Checks every operator while it is active; not those that run inside one of this package's own ops."""

    def __init__(self):
        super().__init__()
        self.inside = False
        self.num_checked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.num_checked += 1
        by_number = func._overloadname == "self_int"  # as many copies of each, which the host knows
        if name in LOOKS | SHAPES_BY_DATA | FROM_HOST and not by_number:
            raise HostError(f"{func} in the middle of a step")
        indices = [index for index in args[1] if index is not None] if name in INDEXING else []
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            raise HostError(f"{func} with a mask in the middle of a step")
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        devices = {str(tensor.device) for tensor in tensors if tensor.ndim}
        if kwargs.get("device") is not None and tensors:
            devices.add(str(torch.device(kwargs["device"])))
        if name in ("_to_copy", "to", "copy_") and len(devices) > 1:
            raise HostError(f"{func} between {' and '.join(sorted(devices))} in the middle of a step")
        was_inside, self.inside = self.inside, self.inside or func.namespace == "specdec"
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = was_inside

    def forbid(self, monkeypatch):
        """Guard what is not dispatched, too."""

        def guarded(name, function):
            def call(*args, **kwargs):
                if not self.inside:
                    raise HostError(f"{name} in the middle of a step")
                return function(*args, **kwargs)

            return call

        for owner, names in (
            (torch.Tensor, ("tolist", "numpy", "__array__", "cpu", "cuda")),
            (torch, ("tensor", "as_tensor", "from_numpy")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))


class GuardedEngine:
    """A `Graphs` that replays nothing: it runs a step under the guard.

    Args:
        opaque: see each of this package's ops as one operator; otherwise what launchers do is checked too.
    """

    def __init__(self, *, opaque=True):
        self.opaque = opaque
        self.num_checked = 0

    def record(self, step):
        if self.opaque:
            step()
        guard = Guard()
        with pytest.MonkeyPatch.context() as patch:
            guard.forbid(patch)
            with guard:
                if self.opaque:
                    with as_ops():
                        step()
                else:
                    step()
        self.num_checked += guard.num_checked

    def reader(self, depth, size):
        raise NotImplementedError
