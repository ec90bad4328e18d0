"""A drafter that does not draft in some steps proposes what it would have proposed had it drafted in all of them."""

import copy
from contextlib import contextmanager

import pytest
import torch

from lib.law_drafters import DRAFTERS, LEARNING, VOCAB_SIZE, build_target, make_drafter
from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.deferred import Deferred
from specdec.drafters.union.union import Union
from specdec.drafting.base import Drafter
from specdec.drafting.candidates import Best
from specdec.loop.decoder import Decoder

# where windows of a network end in the text, no more may wait than they hold
WINDOWED = "eagle3, two layers"
KINDS = [kind for kind in DRAFTERS if kind not in (*LEARNING, "none", "lookahead", WINDOWED)]
# drafts or not, step by step: the first step is left out too, and several in a row
PATTERNS = {"now and then": "0100110001001110000100000001", "rarely": "0000100000000001000000000001"}


class Shadowed(Drafter):
    """Drafts as one drafter, and has another one of its kind draft in some steps, which must propose the same."""

    kind = "shadowed"

    def __init__(self, leader, follower, pattern, *, is_told_later):
        self.leader, self.follower, self.pattern = leader, follower, pattern
        self.shape = leader.shape
        self.later = Deferred(1) if is_told_later else None
        self.num_steps = 0

    def bind(self, target):
        self.leader.bind(target)
        self.follower.bind(target)

    @contextmanager
    def session(self):
        with self.leader.session(), self.follower.session():
            yield

    def allocate(self, room, device):
        self.leader, self.follower = (one.copy_for(room, device) for one in (self.leader, self.follower))

    def start(self, prompt, output):
        self.leader.start(prompt, output)
        self.follower.start(prompt, output)

    def draft(self, root, choose):
        tree = self.leader.draft(root, Best())
        self.drafts = self.pattern[self.num_steps % len(self.pattern)] == "1"
        self.num_steps += 1
        self.root, self.trees = root.clone(), None
        if not self.drafts:
            if self.later is None:
                self.follower.skip(root)
            return tree
        if self.later is not None:
            self.later.tell(0, self.follower)
        self.trees = [self._shown(one) for one in (tree, self.follower.draft(root, Best()))]
        return tree

    @staticmethod
    def _shown(tree):
        """[B, N] tokens, -1 for padding."""
        return torch.where((tree.parent >= 0).expand_as(tree.tokens), tree.tokens, -1)

    def commit(self, verdict, output):
        is_running = verdict.num_accepted >= 0
        if self.trees is not None:
            assert torch.equal(*(tree[is_running] for tree in self.trees))
        self.leader.commit(verdict, output)
        if self.later is None or self.drafts:
            self.follower.commit(verdict, output)
        if self.later is not None:
            self.later.note(self.root, verdict, output, [0] if self.drafts else [])


@pytest.mark.parametrize("is_told_later", [False, True], ids=["told at once", "told later"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_draft_is_that_of_one_that_never_skips(kind, pattern, is_told_later, generator):
    leader = make_drafter(kind)
    follower = make_drafter(kind)
    if kind.startswith("draft_"):  # two decoders would hook one model
        follower.model = copy.deepcopy(follower.model)
    drafter = Shadowed(leader, follower.holding(64), pattern, is_told_later=is_told_later)
    decoder = Decoder(build_target(), drafter)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in (4, 9, 1)]
    rows = decoder.decode(prompts, 28, stop_tokens=[5]).tokens
    assert rows == Decoder(build_target()).decode(prompts, 28, stop_tokens=[5]).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_holding_more_changes_no_step(kind, generator):
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in (4, 9, 1)]
    expected = Decoder(build_target(), make_drafter(kind)).decode(prompts, 20)
    result = Decoder(build_target(), make_drafter(kind).holding(40)).decode(prompts, 20)
    assert result.tokens == expected.tokens
    assert result.stats.num_emitted == expected.stats.num_emitted


def test_fewer_tokens_than_its_own_tree_may_have_accepted_are_refused():
    with pytest.raises(ValueError, match="max_new: expected at least 3, got 2"):
        make_drafter("medusa").holding(2)


def test_windows_limit_what_may_wait():
    drafter = make_drafter(WINDOWED)
    assert drafter.most_new == 5
    with pytest.raises(ValueError, match="windows of 6 positions"):
        Decoder(build_target(), drafter.holding(6))
    union = Union([drafter, make_drafter("suffix")], costs=WayCosts({1: 1.0, 8: 1.2}, {1: 3.0, 2: 0.1}))
    prompts = [torch.tensor([1, 2, 3, 1, 2]), torch.tensor([4])]
    assert (
        Decoder(build_target(), union).decode(prompts, 25).tokens == Decoder(build_target()).decode(prompts, 25).tokens
    )
