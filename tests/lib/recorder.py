"""A CUDA graph without CUDA: the operators of one step, recorded with the tensors they read and wrote, and run again.

As a graph, a recording knows addresses and nothing of Python: replaying reads the recorded inputs and writes the
recorded outputs, wherever the objects that held them point by now. A step that keeps something in an attribute which it
binds anew, or that decides something on the host, replays the past.
"""

import importlib
import pkgutil

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Recording(TorchDispatchMode):
    """The operators that ran while it was active."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = storages((args, kwargs))
        made = [
            (place, tensor)
            for place, tensor in enumerate(tree_leaves(out))
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known
        ]
        # the kept tensors keep their addresses from being given to others; a view is where it was
        self.calls.append((func, args, kwargs, made, out))
        return out

    def replay(self):
        for func, args, kwargs, made, _ in self.calls:
            if made or func._schema.is_mutable:
                out = tree_leaves(func(*args, **kwargs))
                for place, tensor in made:
                    tensor.copy_(out[place])


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
    """An `Engine` for a CPU."""

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

    def reader(self, depth, size):
        return _Reader(depth, size)


class _Counted:
    def __init__(self, recorder, recording):
        self.recorder, self.recording = recorder, recording

    def replay(self):
        self.recorder.num_replays += 1
        self.recording.replay()
