"""Checks that every drafter must pass, whatever it is made of."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Best
from specdec.drafting.draft_tree import DraftTree
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target


@dataclass
class Draft:
    """One recorded proposal of one row: the committed text and root it was made for, its tree, and the logits."""

    text: torch.Tensor
    root: int
    tokens: list[int]
    parent: list[int]
    logits: list[torch.Tensor]


class Recording:
    """`Best` that keeps the logits that it saw."""

    def __init__(self):
        self.logits = []

    def __call__(self, logits, num_ranks):
        self.logits.append(logits.clone())
        return Best()(logits, num_ranks)


class Nudged(Drafter):
    """Another drafter whose proposals are recorded, and then mended on part of a path so that some are accepted.

    Random networks are almost never right; what a drafter remembers is tested by steps that accept none, some and all
    of a path, in every row at other times. Not for draft models, which keep the keys of the tokens they proposed.
    """

    kind = "nudged"

    def __init__(self, inner: Drafter, expected: list[list[int]], prompts: list[torch.Tensor], seed: int = 0) -> None:
        self.inner = inner
        self.expected = expected
        self.prompts = prompts
        self.generator = torch.Generator().manual_seed(seed)
        self.drafts: list[list[Draft]] = [[] for _ in prompts]

    @property
    def shape(self):
        return self.inner.shape

    def bind(self, target):
        self.inner.bind(target)

    def session(self):
        return self.inner.session()

    def allocate(self, room, device):
        self.inner.allocate(room, device)

    def start(self, prompt, output):
        self.num_done = torch.zeros_like(prompt.lengths)
        self.inner.start(prompt, output)

    def draft(self, root, choose):
        choose = Recording()
        tree = self.inner.draft(root, choose)
        tokens = tree.tokens.clone()
        parents = tree.parent.expand_as(tokens).tolist()
        for row, (prompt, expected, parent) in enumerate(zip(self.prompts, self.expected, parents, strict=True)):
            done = int(self.num_done[row])  # emitted tokens before the root
            if done >= len(expected) - 1:
                continue  # the row has ended
            text = torch.cat((prompt, torch.tensor(expected[:done], dtype=torch.int64)))
            assert expected[done] == int(root[row])
            self.drafts[row].append(
                Draft(
                    text, int(root[row]), tree.tokens[row].tolist(), parent, [logits[row] for logits in choose.logits]
                )
            )
            node, depth = 0, 0
            while torch.rand((), generator=self.generator) < 0.7 and done + depth + 1 < len(expected):
                children = [child for child in range(1, len(parent)) if parent[child] == node]
                if not children:
                    break
                node = children[int(torch.randint(len(children), (), generator=self.generator))]
                depth += 1
                tokens[row, node] = expected[done + depth]
        return replace(tree, tokens=tokens, laws=None, law_row=None)

    def commit(self, verdict, output):
        self.num_done += verdict.num_emitted
        self.inner.commit(verdict, output)


def check_drafter(make_drafter, model, prompts, *, max_new_tokens=40, min_tau=1.5):
    """Losslessness, and that a drafter in the middle of a batch proposes what a fresh one proposes for the same text.

    Args:
        make_drafter: builds the drafter anew, with the same weights each time.
        model: the target.
        prompts: 1-D tensors of token ids.
        max_new_tokens: how far to decode.
        min_tau: the mended proposals must be accepted at least this well, else the check checked nothing.
    """
    plain = Decoder(model).decode(prompts, max_new_tokens).tokens
    nudged = Nudged(make_drafter(), plain, prompts)
    result = Decoder(model, nudged).decode(prompts, max_new_tokens)
    assert result.tokens == plain
    assert result.stats.tau >= min_tau, f"tau {result.stats.tau}: hardly anything was accepted"
    for drafts in nudged.drafts:
        for draft in drafts:
            choose = Recording()
            fresh = propose(make_drafter(), model, draft.text, draft.root, choose)
            assert fresh.parent.expand_as(fresh.tokens)[0].tolist() == draft.parent
            assert fresh.tokens[0].tolist() == draft.tokens
            for got, expected in zip(draft.logits, choose.logits, strict=True):
                # fp32, with keys and states that came about step by step in one and at once in the other
                assert (got - expected[0]).abs().max() < 1e-3 * expected.abs().max()
    return result


def begin(drafter: Drafter, prompt: Prompt, output) -> None:
    """What the loop does at the beginning of a generation."""
    width = prompt.tokens.shape[1]
    drafter.allocate(Room(len(prompt.tokens), prompt.max_length, width, prompt.max_length - width), torch.device("cpu"))
    drafter.start(prompt, output)


def start_texts(drafter: Drafter, target: Target, prompts, max_new: int = 40) -> None:
    """Begin with lists of tokens, with a drafter that does not ask the target."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    drafter.bind(target)
    begin(drafter, Prompt(tokens, lengths, int(lengths.max()) + max_new), SimpleNamespace(first=0))


@torch.no_grad()
def propose(drafter: Drafter, model, text: torch.Tensor, root: int, choose=None) -> DraftTree:
    """What a drafter proposes after [T] committed tokens and a root, from a fresh start."""
    target = Target(model)
    drafter.bind(target)
    lengths = torch.tensor([len(text)], dtype=torch.int32)
    prompt = Prompt(text[None], lengths, max_length=len(text) + 1)
    with target.hooked(), drafter.session():
        cache = target.new_cache(1, len(text) + 1)
        begin(drafter, prompt, target.prefill(prompt.tokens, lengths, cache))
        return drafter.draft(torch.tensor([root], dtype=torch.int32), choose or Best())
