"""Rows come and go under a captured step: no address moves, nothing waits, texts are those of the eager loop."""

from collections import deque

import pytest

import specdec
from lib.engine_requests import PATIENCE, alone, requests
from lib.guard import Guard
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from lib.recorder import Recorder, references_as_kernels
from specdec.engine.pool import RowPool
from specdec.engine.requests import Handle
from specdec.engine.settings import read_request
from specdec.engine.tasks import Task
from specdec.kernels.common.library import as_ops
from specdec.loop.decoder import Decoder
from specdec.loop.memory import tensors_of
from specdec.models.target.target import Target

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    references_as_kernels(monkeypatch)


def a_target():
    return Target(build_target(), backend="triton")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_replayed_rows_emit_what_they_would_alone(kind):
    """In memories of one, two, four and eight rows, each with steps of its own; sampled requests among the others."""
    recorder = Recorder()
    sampling = {"do_sample": True, "temperature": 0.9, "acceptance": "naive"}
    with specdec.Engine(a_target(), make_drafter(kind), tree=None, max_rows=8, capture=recorder) as engine:
        handles = []
        for number, (prompt, count) in enumerate(requests()):
            settings = {"do_sample": True, "temperature": 0.9, "seed": number} if number > 11 else {}
            handles.append(engine.submit(prompt, max_new_tokens=count, **settings))
            if number in (0, 2):
                handles[-1].result(PATIENCE)
        tokens = [handle.result(PATIENCE).tokens for handle in handles]
    for number, (text, (prompt, count)) in enumerate(zip(tokens, requests(), strict=True)):
        assert text == alone(build_target(), prompt, count, **(sampling | {"seed": number} if number > 11 else {}))
    assert recorder.num_replays > 20
    assert recorder.stale == []


def test_log_probabilities_are_told_between_replays():
    with specdec.Engine(a_target(), make_drafter("medusa"), tree=None, max_rows=4, capture=Recorder()) as engine:
        plain = engine.submit([1, 2, 3], max_new_tokens=30)
        told = engine.submit([3, 2, 1], max_new_tokens=12, logprobs=2)
        assert plain.result(PATIENCE).tokens == alone(build_target(), [1, 2, 3], 30)
        assert [one.token for one in told.result(PATIENCE).logprobs] == alone(build_target(), [3, 2, 1], 12)


def task(target, number, prompt, count):
    settings = read_request(target, len(prompt), 64, {"max_new_tokens": count, "do_sample": False})
    return Task(Handle(number, prompt, settings))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_refilling_moves_no_address_and_waits_for_nothing(kind, monkeypatch):
    """Once a memory is there: prompts are read, rows are copied, rows end and the step is replayed under the guard."""
    target = a_target()
    decoder = Decoder(target, make_drafter(kind), capture=Recorder())
    pool = RowPool(decoder, max_rows=2, max_length=64, prefill_tokens=6, stop_tokens=())
    waiting = deque(task(target, number, prompt, count) for number, (prompt, count) in enumerate(requests(9)))
    handles = [one.handle for one in waiting]
    with decoder.running():
        pool.open()
        while pool.num_rows < 2 or pool._refill is not None:
            pool.take_from(waiting)
            pool.advance(is_waiting=True)
        memory = pool._running.memory
        places = [one.data_ptr() for one in tensors_of(memory.state, memory.drafter)]
        num_guarded, refill = 0, None
        for name in ("take_rows", "end", "message"):
            setattr(memory, name, guarded(monkeypatch, getattr(memory, name)))
        while waiting or pool.tasks:
            pool.take_from(waiting)
            if pool._refill is not None and pool._refill is not refill:
                refill = pool._refill
                refill.advance = guarded(monkeypatch, refill.advance)
                num_guarded += 1
            pool.advance(is_waiting=True)
        assert pool._running.memory is memory
        assert places == [one.data_ptr() for one in tensors_of(memory.state, memory.drafter)]
    assert num_guarded > 4
    for handle, (prompt, count) in zip(handles, requests(9), strict=True):
        assert handle.result(0).tokens == alone(build_target(), prompt, count)


def guarded(monkeypatch, function):
    """The function under the guard, which raises at whatever would make the host wait."""

    def call(*args):
        guard = Guard()
        with monkeypatch.context() as patch:
            guard.forbid(patch)
            with guard, as_ops():
                return function(*args)

    return call
