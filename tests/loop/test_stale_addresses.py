"""Whatever happens to models and drafters between calls, a replay reads no memory that is nobody's any more.

The recorder keeps nothing alive that a recording reads, as a CUDA graph does, and notes each read of freed memory. The
text of greedy decoding does not tell: it is right whatever the drafter proposes. What steps accepted does.
"""

import copy
import gc
import threading
from functools import cache

import pytest
import torch
from torch import nn

import specdec
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from lib.recorder import Recorder, references_as_kernels
from specdec.loop.decoder import Decoder
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
WITH_NETWORK = ["draft_tree", "medusa", "hydra++", "eagle", "eagle3", "amphista", "parallelspec", "falcon"]


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


def generated(target, drafter, **settings):
    """Tokens and what steps accepted."""
    settings = {"max_new_tokens": 10, "return_dict_in_generate": True, "do_sample": False, "seed": 3, **settings}
    output = specdec.generate(target, drafter, IDS, **settings)
    return output.sequences.tolist(), output.stats.num_emitted


def decoded(decoder):
    result = decoder.decode(PROMPTS, 5, seed=3)
    return result.tokens, result.stats.num_emitted


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
    assert [recorder.num_recorded for recorder in recorders] == [1, 1]
    assert all(recorder.num_replays for recorder in recorders)
