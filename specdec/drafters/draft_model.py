"""A separate small language model as the drafter: speculative decoding (SpS) and its multi-candidate form (MCSD).

Paper: Leviathan et al. 2023 (arXiv:2211.17192) for a chain; Yang et al. 2024, multi-candidate speculative decoding
(papers' `k_config`), for a tree.
Proposes: any static tree, level by level; each parent has its own list of candidates, the best ones or drawn ones.
Needs from the target: nothing but the tokens. Both have the same tokenizer; vocabularies may be padded differently.
Cost of one draft: one pass of the draft model per level; the deepest level is never fed to it.
Deviations: what was accepted is read anew in the first pass of the next draft, whoever had proposed it, and what the
draft model computed for its own nodes is overwritten: no pass over the deepest level, and no compaction.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from specdec.common.files import replace_folder
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Candidates, Choose, choose_from
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.common.cache import RowState
from specdec.models.common.placing import place
from specdec.models.target.scores import Scores
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.levels import plan_levels
from specdec.trees.shape import MAX_NODES, TreeShape

__all__ = ["DraftModel"]

MAX_PADDING = 1024
"""Tokens by which the vocabularies may differ, as padding does within a family (Qwen2.5: 151936 and 152064)."""


class DraftModel(Drafter):
    """Tree drafting with a second, smaller causal LM of the same tokenizer.

    Args:
        model: the draft model; hooked while a generation runs.
        shape: the tree to propose; a chain is SpS.

    Raises:
        ValueError: the tree takes ranks beyond the draft model's vocabulary, or is the root alone.
    """

    kind: ClassVar[str] = "draft_model"
    shape: TreeShape
    shares_candidates = False
    default_tree: ClassVar[tuple[int, ...]] = (4, 2, 2)

    def __init__(self, model: PreTrainedModel, shape: TreeShape) -> None:
        if shape.max_depth < 1:
            raise ValueError("tree: expected at least one draft token, got the root alone")
        if shape.num_nodes >= MAX_NODES:
            raise ValueError(f"tree: expected at most {MAX_NODES - 1} nodes with a draft model, got {shape.num_nodes}")
        self.model = model
        self.shape = shape

    def save_pretrained(self, folder: str | os.PathLike[str], *, texts: Mapping[str, str] | None = None) -> None:
        """Save the model, as transformers does, with the tree, to a folder that `specdec.load_drafter` reads.

        Args:
            folder: replaced in one step if it exists; after an error the old one is still there.
            texts: further files by name.
        """
        with replace_folder(folder) as staging:
            self.model.save_pretrained(staging)
            self.shape.save(staging / "tree.json")
            for name, text in (texts or {}).items():
                staging.joinpath(name).write_text(text, encoding="utf-8")

    def with_tree(self, tree: TreeShape) -> "DraftModel":
        """As `Drafter`."""
        return DraftModel(self.model, tree)

    @property
    def can_sample(self) -> bool:
        """Yes: every list of candidates has its own law."""
        return True

    def bind(self, target: Target) -> None:
        """Check the vocabulary, move to the target's device and lay out the levels."""
        place(self.model, target.device)
        self.draft_target = Target(self.model, backend=target.backend, fused=target.fused)
        self._vocab_size = target.vocab_size
        self._missing = target.vocab_size - self.draft_target.vocab_size
        if abs(self._missing) > MAX_PADDING:
            raise ValueError(
                f"drafter: expected the target's vocabulary of {target.vocab_size} tokens, or one padded differently "
                f"by up to {MAX_PADDING}, got {self.draft_target.vocab_size}"
            )
        num_tokens = min(self.draft_target.vocab_size, target.vocab_size)
        if self.shape.max_rank >= num_tokens:
            raise ValueError(f"tree: expected ranks below {num_tokens}, got {self.shape.max_rank}")
        self._template = TreeTemplate(self.shape, target.device, rows="parent", backend=target.backend)
        self._levels = plan_levels(self.shape, target.device)
        self._places = torch.arange(self.max_new, dtype=torch.int32, device=target.device)[None]
        self._chain = pack_words(torch.ones(1, self.max_new, self.max_new, device=target.device).tril().bool())
        self._num_ranks = self.shape.max_rank + 1

    def session(self) -> AbstractContextManager[None]:
        """The draft model is hooked while a generation runs."""
        return self.draft_target.hooked()

    def allocate(self, room: Room, device: torch.device) -> None:
        """The draft model's cache, and the tokens that wait to be read."""
        capacity = room.max_length + max(self.shape.num_nodes, self.max_new)
        self._cache = self.draft_target.new_cache(room.batch_size, capacity, device=device)
        # behind those that wait there is room for all that a step may emit, padding included
        self._waiting = torch.zeros(room.batch_size, 2 * self.max_new, dtype=torch.int32, device=device)
        self._counts = torch.zeros(room.batch_size, dtype=torch.int32, device=device)
        self._rows = torch.arange(room.batch_size, device=device)
        self._may_ask = room.may_ask

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return self._cache, self._waiting, self._counts

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Run the chunk through the draft model."""
        end = output.first + output.hidden.shape[1]
        self.draft_target.read_chunk(self._known(prompt.tokens[:, output.first : end]), output.first, self._cache)
        self._cache.lengths.copy_(prompt.lengths)
        self._counts.fill_(1)  # the root

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over what was emitted since the last draft, then one per level; nodes with children have a list."""
        self.skip(root)
        width = max(1, int(self._counts.max())) if self._may_ask else self.max_new
        words = self._chain[:, :width, : (width + 31) // 32]
        output = self.draft_target.score(
            self._known(self._waiting[:, :width]), self._places[:, :width], words, self._cache
        )
        newest = self._rows, (self._counts.long() - 1).clamp(min=0)
        self._cache.lengths += self._counts
        self._counts.zero_()
        candidates = [self._choose(choose, output.scores, newest)]
        for level in self._levels:
            tokens = self._known(candidates[-1].tokens.flatten(1)[:, level.candidate])
            output = self.draft_target.score(
                tokens, level.depth, level.ancestors, self._cache, first_node=level.first_slot
            )
            candidates.append(self._choose(choose, output.scores, level.inner))
        return self._template.expand(Candidates.cat(candidates), root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`: the root waits with what was emitted before it."""
        self._waiting.scatter_(1, (self._counts.long() - 1).clamp(min=0)[:, None], root[:, None])

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Let the emitted tokens wait for the next draft, which overwrites what this one computed for its nodes."""
        places = self._counts.long()[:, None] + self._places[:, : verdict.emitted.shape[1]]
        self._waiting.scatter_(1, places, verdict.emitted.clamp(min=0))
        self._counts += verdict.num_emitted

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens that the draft model has; those that it lacks are padding, which no text holds."""
        return tokens.clamp(max=self.draft_target.vocab_size - 1) if self._missing > 0 else tokens

    def _choose(
        self, choose: Choose, scores: Scores, places: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> Candidates:
        """Candidates at places of a pass, [m] of all rows or one of each as (row, place); of tokens that both have."""
        states = scores.states[places][:, None] if isinstance(places, tuple) else scores.states[:, places]
        return choose_from(choose, scores.heads.over(self._vocab_size), states, self._num_ranks)
