"""Rows are moved between batches in the middle of their texts, and go on as if nothing had happened: every drafter."""

import pytest
import torch

from lib.law_drafters import DRAFTERS, LEARNING, VOCAB_SIZE, build_target, make_drafter
from specdec.drafting.base import Prompt, Room
from specdec.drafting.draft_tree import DraftTree
from specdec.loop.decoder import Decoder, without_autograd
from specdec.loop.processing import Processing
from specdec.loop.timing import PhaseTimer
from specdec.models.common.cache import KVCache, copy_row

NEW = 24
CPU = torch.device("cpu")


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (3, 9, 6)]


class Batch:
    """A generation that is stepped by hand; rows beyond the prompts are padding."""

    def __init__(self, decoder, num_rows, rows, *, may_ask):
        room = Room(num_rows, 40, 39, 39, may_ask=may_ask)
        self.state = decoder._new_state(room, CPU)
        self.drafter = decoder.drafter.copy_for(room, CPU)
        timer = PhaseTimer(CPU, enabled=False)
        self.generation = decoder._generation(self.state, self.drafter, None, Processing.none(), timer)
        prompt = Prompt.padded(rows, num_rows, 40, CPU)
        self.generation.begin(prompt, NEW, torch.zeros(len(rows), dtype=torch.int64))
        self.planner = self.drafter.planner()
        self.deepest = []

    def step(self):
        self.generation.step(self.planner.choose())
        if self.drafter.forecast is not None:
            self.planner.observe(self.drafter.forecast.tolist())
        self.deepest.append(self.state.steps[int(self.state.uniforms.step) - 1, 1].tolist())

    def parts(self):
        self.drafter.settle()
        return [*self.state.row_state, *self.drafter.row_state()]

    def text(self, row):
        return self.state.output[row, : int(self.state.num_output[row])].tolist()


@pytest.mark.parametrize("may_ask", [False, True], ids=["fixed shapes", "asking"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_row_goes_on_in_another_batch(kind, may_ask):
    """One row is moved into a batch in which another one runs; all its later steps accept what they accepted alone."""
    decoder = Decoder(build_target(), make_drafter(kind))
    first, second, third = prompts()
    expected = Decoder(build_target()).decode([first, second, third], NEW).tokens
    with without_autograd(CPU), decoder.target.hooked(), decoder.drafter.session(), decoder.scratch.active():
        alone = Batch(decoder, 1, [first], may_ask=may_ask)
        guests = Batch(decoder, 3, [second, third], may_ask=may_ask)
        for _ in range(2):
            alone.step()
            guests.step()
        kept = Batch(decoder, 1, [first], may_ask=may_ask)
        copy_of(alone, 0, kept, 0)
        copy_of(alone, 0, guests, 2)
        copy_of(guests, 1, guests, 0)  # the row that was there has gone
        kept.planner = kept.drafter.planner(is_moved=True)
        guests.planner = guests.drafter.planner(is_moved=True)
        for batch in (kept, guests):
            while batch.state.budget.any():
                batch.step()
    assert kept.text(0) == guests.text(2) == expected[0]
    assert guests.text(0) == guests.text(1) == expected[2]
    if kind not in LEARNING:
        own = [deepest[2] for deepest in guests.deepest]
        assert [deepest[0] for deepest in kept.deepest][: len(own)] == own[2:][: len(kept.deepest)]


def copy_of(source, source_row, target, row):
    num_tokens = int(source.state.cache.lengths[source_row])
    copy_row(target.parts(), row, source.parts(), source_row, num_tokens)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_all_that_has_rows_is_moved(kind):
    """Whatever grows with the batch belongs to the rows, or says where rows lie."""
    decoder = Decoder(build_target(), make_drafter(kind))

    def sizes(num_rows):
        room, meta = Room(num_rows, 40, 39, 39), torch.device("meta")
        drafter = decoder.drafter.copy_for(room, meta)
        return named_tensors(drafter), drafter

    (small, drafter), (large, _) = sizes(2), sizes(3)
    moved = set()
    for part in drafter.row_state():
        moved |= {id(part.data), id(part.lengths)} if isinstance(part, KVCache) else {id(part), id(part._base)}
    grows = {name for name, one in small.items() if one.shape != large[name].shape and id(one) not in moved}
    assert {name.rpartition(".")[2] for name in grows} <= {"_rows", "row_starts", "_nothing", "_row_starts", "_flat"}


def named_tensors(value, name="", seen=None):
    """All tensors that a drafter holds of its own, by name."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (torch.nn.Module, DraftTree)):
        return {}
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return {name: value} if value.is_meta else {}
    if isinstance(value, KVCache):
        return named_tensors({key: getattr(value, key) for key in ("data", "lengths", "row_starts")}, name, seen)
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif type(value).__module__.startswith("specdec.") and type(value).__name__ != "Target":
        items = {**getattr(value, "__dict__", {})}.items()
    else:
        return {}
    return {k: v for key, one in items for k, v in named_tensors(one, f"{name}.{key}", seen).items()}
