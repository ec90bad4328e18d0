"""A CUDA graph without CUDA: the operators of one step, recorded with the tensors they read and wrote, and run again.

As a graph, a recording knows addresses and nothing of Python: replaying reads the recorded inputs and writes the
recorded outputs, wherever the objects that held them point by now. A step that keeps something in an attribute which it
binds anew, or that decides something on the host, replays the past.

As a graph, it keeps nothing alive but what was made inside of the step (a graph's own memory pool). What came from
outside is known by where it lies. Once nobody else holds that memory, or it lies elsewhere, a replay reads poison in
its place, as a graph reads whatever an allocator has put there: NaN, or an integer that is no index of anything. Each
such read is noted in `Recorder.stale`.
"""

import importlib
import pkgutil
import weakref
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import specdec.kernels
from specdec.kernels.common.library import as_ops


def references_as_kernels(monkeypatch):
    """Let every launcher run its reference, whatever backend it is asked for.

    A target with `backend="triton"` then takes the way of a GPU through all code above the kernels, at the speed of the
    references.
    """
    for module in pkgutil.iter_modules(specdec.kernels.__path__):
        loaded = importlib.import_module(f"specdec.kernels.{module.name}")
        if hasattr(loaded, "resolve_backend"):
            monkeypatch.setattr(loaded, "resolve_backend", lambda tensor, backend=None: "reference")


def storages(values):
    return {value.untyped_storage()._cdata for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


class Outside:
    """A tensor that was there before the recording: where it lies, without keeping it there."""

    def __init__(self, tensor):
        storage = tensor.untyped_storage()
        self.storage, self.address = weakref.ref(storage), storage.data_ptr()
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.geometry = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self):
        """The memory as it is now, if it still is anyone's; else None."""
        storage = self.storage()
        if storage is None or storage.data_ptr() != self.address:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.geometry)

    def poison(self):
        """What an allocator may have put there meanwhile."""
        if self.dtype.is_floating_point:
            return torch.full(self.shape, float("nan"), dtype=self.dtype)
        return torch.full(self.shape, True if self.dtype == torch.bool else torch.iinfo(self.dtype).max // 2 + 1)


class Recording(TorchDispatchMode):
    """The operators that ran while it was active.

    Attributes:
        calls: per operator: itself, its arguments with `Outside` in the place of tensors from outside, the tensors that
            it made, and what it returned, which is None where it lies outside.
        stale: what replays read of memory that is nobody's any more, by operator.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.stale = []
        self._inside = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = storages((args, kwargs))
        made = [
            (place, tensor)
            for place, tensor in enumerate(tree_leaves(out))
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known
        ]
        args, kwargs = tree_map_only(torch.Tensor, self._known, (args, kwargs))
        # kept tensors keep their addresses from being given to others; a view is where it was
        self._inside |= storages([tensor for _, tensor in made])
        kept = tree_map_only(torch.Tensor, lambda tensor: tensor if self._is_inside(tensor) else None, out)
        self.calls.append((func, args, kwargs, made, kept))
        return out

    def replay(self):
        for func, args, kwargs, made, _ in self.calls:
            if made or func._schema.is_mutable:
                found = tree_map_only(Outside, partial(self._found, func), (args, kwargs))
                out = tree_leaves(func(*found[0], **found[1]))
                for place, tensor in made:
                    tensor.copy_(out[place])

    def _is_inside(self, tensor):
        return tensor.untyped_storage()._cdata in self._inside

    def _known(self, tensor):
        return tensor if self._is_inside(tensor) else Outside(tensor)

    def _found(self, func, outside):
        tensor = outside.tensor()
        if tensor is None:
            self.stale.append(f"{func} reads {list(outside.shape)} of {outside.dtype}")
            tensor = outside.poison()
        return tensor


class _Reader:
    def __init__(self, depth, size):
        self.depth, self.size, self.sent = depth, size, []

    def push(self, value):
        assert value.dtype == torch.int32
        assert value.shape == (self.size,)
        self.sent.append(value.tolist())
        assert len(self.sent) <= self.depth

    def pop(self):
        return self.sent.pop(0)


class Recorder:
    """A `Graphs` for a CPU."""

    def __init__(self):
        self.num_recorded = 0
        self.num_replays = 0
        self.recordings = []

    def record(self, step):
        self.num_recorded += 1
        step()
        recording = Recording()
        with as_ops(), recording:
            step()
        self.recordings.append(recording)
        return _Counted(self, recording)

    @property
    def stale(self):
        """What all replays read of memory that is nobody's any more."""
        return [line for recording in self.recordings for line in recording.stale]

    def reader(self, depth, size):
        return _Reader(depth, size)


class _Counted:
    def __init__(self, recorder, recording):
        self.recorder, self.recording = recorder, recording

    def replay(self):
        self.recorder.num_replays += 1
        self.recording.replay()
