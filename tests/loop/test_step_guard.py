"""A step never needs the host: no waiting, no shapes that depend on data, no copies to or from the device."""

import importlib
import os

import pytest
import torch
from transformers import GenerationConfig

from lib.families import FAMILIES, build_model
from lib.guard import Guard, GuardedEngine, HostError
from lib.law_drafters import build_target, judged_by, make_drafter
from lib.recorder import references_as_kernels
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.eagle import Eagle
from specdec.drafting.base import Drafter
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.rules import RULES, Typical
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

BY_NAME = {**{name: rule() for name, rule in RULES.items()}, "typical, drawn": Typical(root="sampled")}
CASES = judged_by(BY_NAME)
pytestmark = pytest.mark.interpreter

EVERYTHING = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}


def processing(**settings):
    sizes = {"prompt_lengths": [1], "max_new_tokens": 8, "width": 1}
    return Processing(GenerationConfig(**settings), do_sample=True, **sizes, backend="triton")


def check(target, drafter, rule="greedy", *, opaque=True, **settings):
    decoder = Decoder(target, drafter, acceptance=BY_NAME[rule], capture=GuardedEngine(opaque=opaque))
    assert decoder.warmup(batch_size=2, max_length=40, num_stop_tokens=1, processing=processing(**settings))
    assert decoder.captured.graphs.num_checked > 20


@pytest.mark.parametrize(("kind", "rule"), CASES, ids=["-".join(case) for case in CASES])
def test_no_drafter_and_no_rule_needs_the_host(kind, rule, monkeypatch):
    references_as_kernels(monkeypatch)
    check(Target(build_target(), backend="triton"), make_drafter(kind), rule, **EVERYTHING)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_needs_the_host(family, monkeypatch):
    references_as_kernels(monkeypatch)
    drafter = DraftModel(build_model(family, seed=1), TreeShape.from_k_config((2, 1)))
    check(Target(build_model(family), backend="triton"), drafter)


def dynamic_eagle() -> Drafter:
    return Eagle(make_drafter("eagle").network, DynamicTree(num_nodes=8, depth=2, top_k=3))


def test_growing_a_tree_does_not_need_the_host(monkeypatch):
    references_as_kernels(monkeypatch)
    check(Target(build_target(), backend="triton"), dynamic_eagle())


LAUNCHES = [*CASES, ("dynamic", "greedy")]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are left out, which the interpreter allows"
)
@pytest.mark.parametrize(("kind", "rule"), LAUNCHES, ids=["-".join(case) for case in LAUNCHES])
def test_no_launcher_needs_the_host(kind, rule, monkeypatch):
    """With launches that do nothing and memory that is zero: what is left is what launchers do on the host."""
    from triton.runtime.interpreter import InterpretedFunction

    launched = []
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kw: launched.append(self)
    )
    for name in ("common.walk", "learn_chances", "tree_merge", "tree_rerank"):  # values are checked on a CPU alone
        module = importlib.import_module(f"specdec.kernels.{name}")
        monkeypatch.setattr(module, "check_parent", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    drafter = dynamic_eagle() if kind == "dynamic" else make_drafter(kind)
    check(Target(build_target(), backend="triton"), drafter, rule, opaque=False, **EVERYTHING)
    assert launched


VALUES = torch.arange(3)
FORBIDDEN = {
    "item": lambda: VALUES[1].item(),
    "bool": lambda: bool(VALUES[1]),
    "tolist": lambda: VALUES.tolist(),
    "numpy": lambda: VALUES.numpy(),
    "cpu": lambda: VALUES.cpu(),
    "nonzero": lambda: VALUES.nonzero(),
    "where": lambda: torch.where(VALUES > 0),
    "mask": lambda: VALUES[VALUES > 0],
    "mask assignment": lambda: VALUES.clone().__setitem__(VALUES > 0, VALUES[1:]),
    "masked_select": lambda: VALUES.masked_select(VALUES > 0),
    "unique": lambda: VALUES.unique(),
    "tensor": lambda: torch.tensor([1, 2]),
    "another device": lambda: VALUES.to("meta"),
}


@pytest.mark.parametrize("forbidden", FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_guard_sees(forbidden, monkeypatch):
    guard = Guard()
    guard.forbid(monkeypatch)
    with guard, pytest.raises(HostError, match="in the middle of a step"):
        forbidden()


def test_the_guard_lets_what_a_graph_can_hold_pass(monkeypatch):
    guard = Guard()
    guard.forbid(monkeypatch)
    with guard:
        values = VALUES.float().masked_fill(VALUES > 1, 0.0)
        values[VALUES] = values.cumsum(0)
        values[:, None].fill_(2)
    assert guard.num_checked > 3
