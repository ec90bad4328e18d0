"""Whatever happens to models and drafters between calls, a replay reads no memory that is nobody's any more.

The recorder keeps nothing alive that a recording reads, as a CUDA graph does, and notes each read of freed memory. The
text of greedy decoding does not tell: it is right whatever the drafter proposes. What steps accepted does.
"""

import copy
import gc
import logging
import threading
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from lib.recorder import Recorder, references_as_kernels
from specdec.loop.decoder import Decoder
from specdec.loop.graphs import CannotCaptureError, NoWaiting
from specdec.loop.rules import choose_rule
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree

pytestmark = pytest.mark.interpreter

PROMPTS = [torch.tensor([1, 2, 3, 4])]
IDS = PROMPTS[0][None]
DYNAMIC = DynamicTree(num_nodes=5, depth=2, top_k=2)


def a_drafter(kind):
    if kind in ("eagle2", "eagle3, dynamic"):
        drafter = make_drafter(kind.split(",")[0].replace("2", ""))
        return type(drafter)(drafter.network, DYNAMIC, **drafter.settings)
    return make_drafter(kind)


KINDS = [*DRAFTERS, "eagle2", "eagle3, dynamic"]


@cache
def model_of(dtype, seed):
    return copy.deepcopy(build_target(seed)).to(dtype)


def a_target(dtype=torch.bfloat16, seed=0, *, own=False):
    model = model_of(dtype, seed)
    return Target(copy.deepcopy(model) if own else model, backend="triton")


@pytest.fixture(autouse=True)
def recorders(monkeypatch):
    """The recorders of all decoders that capture."""
    references_as_kernels(monkeypatch)
    made = []

    def decoder(*args, capture=True, **settings):
        if capture is True:
            capture = Recorder()
            made.append(capture)
        return Decoder(*args, capture=capture, **settings)

    monkeypatch.setattr("specdec.generation.generate.Decoder", decoder)
    yield made
    assert [line for recorder in made for line in recorder.stale] == []


@pytest.fixture(autouse=True)
def weights_that_cudnn_moves(monkeypatch):
    """`nn.LSTM` gives its weights other memory whenever it is moved, as it does on a GPU for what cuDNN can run."""

    def flatten_parameters(lstm):
        if lstm._flat_weights[0].dtype in (torch.float32, torch.float16):
            for weight in lstm._flat_weights:
                weight.data = weight.data.clone()

    monkeypatch.setattr(nn.LSTM, "flatten_parameters", flatten_parameters)


def decoded(decoder):
    result = decoder.decode(PROMPTS, 5, seed=3)
    # a union's steps depend on what earlier calls accepted, its texts do not
    return result.tokens, None if result.stats.plan is not None else result.stats.num_emitted


def eager(target, drafter, rule=None):
    return decoded(Decoder(target, drafter, acceptance=rule, capture=False))


def in_a_thread(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_targets_in_turn_and_a_second_thread(kind, sampling, dtype, recorders):
    drafter, targets = a_drafter(kind), [a_target(dtype, seed) for seed in (0, 2)]
    rule = choose_rule("auto", drafter, do_sample=sampling)
    decoders, expected = [], []
    for target in targets:
        expected.append(eager(target, drafter, rule))
        recorders.append(Recorder())
        decoders.append(Decoder(target, drafter, acceptance=rule, capture=recorders[-1]))
    assert [decoded(decoder) for decoder in decoders] == expected
    drafter.bind(targets[0])
    gc.collect()
    assert [decoded(decoder) for decoder in decoders] == expected
    assert in_a_thread(decoded, decoders[0]) == expected[0]
    assert [recorder.num_recorded for recorder in recorders] == [drafter.num_ways] * 2
    assert all(recorder.num_replays for recorder in recorders)


@pytest.mark.parametrize("kind", ["eagle", "falcon", "draft_tree"])
def test_generate_keeps_its_recording_from_call_to_call(kind, recorders):
    target, drafter = a_target(torch.float16), a_drafter(kind)
    expected = eager(target, drafter)
    for _ in range(3):
        gc.collect()
        output = specdec.generate(target, drafter, IDS, max_new_tokens=5, return_dict_in_generate=True)
        assert output.sequences[0, 4:].tolist() == expected[0][0]
        assert output.stats.num_emitted == expected[1]
    assert [recorder.num_recorded for recorder in recorders] == [1]


def moved_and_back(target, drafter):
    drafter.network.double()
    drafter.network.to(target.dtype)


def replaced(target, drafter):
    for module in drafter.network.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                setattr(module, name, nn.Parameter(weight.detach().clone()))


def cast(target, drafter):
    target.model.to(torch.float16)


def trained_in_place(target, drafter):
    drafter.network.train()
    with torch.no_grad():
        for weight in drafter.network.parameters():
            weight.mul_(0.5)


@pytest.mark.parametrize("change", [moved_and_back, replaced, cast, trained_in_place])
@pytest.mark.parametrize("kind", ["hydra++", "eagle", "falcon"])
def test_what_changes_between_calls_is_what_the_next_call_reads(kind, change, recorders):
    target, drafter = a_target(own=True), a_drafter(kind)
    recorders.append(Recorder())
    decoder = Decoder(target, drafter, capture=recorders[-1])
    assert decoded(decoder) == eager(target, drafter)
    change(target, drafter)
    gc.collect()
    assert decoded(decoder) == decoded(decoder) == eager(Target(target.model, backend="triton"), drafter)
    assert recorders[-1].num_recorded == (1 if change is trained_in_place else 2)


def test_a_recording_that_fails_half_way_leaves_the_eager_loop_and_one_line(caplog):
    class Breaks(TorchDispatchMode):
        left = 60

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.left -= 1
            if self.left < 0:
                raise CannotCaptureError("recording failed half way")
            return func(*args, **(kwargs or {}))

    class Graphs(Recorder):
        def record(self, step):
            with Breaks():
                step()

    target, drafter = a_target(), a_drafter("eagle")
    decoder = Decoder(target, drafter, capture=Graphs())
    with caplog.at_level(logging.WARNING, logger="specdec"):
        assert decoded(decoder) == decoded(decoder) == eager(target, drafter)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["recording failed half way"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.to("meta"),
        lambda x: bool((x > 0).any()),
    ],
)
def test_what_waits_for_the_device_is_refused_in_its_own_thread_alone(wait):
    value = torch.ones(3)
    with NoWaiting():
        value += 1
        assert in_a_thread(value.tolist) == [2.0] * 3
        with pytest.raises(CannotCaptureError, match="synchroniz"):
            wait(value)
