"""A generation and its step: draft -> score -> verify -> commit. Read this file first.

Five nouns (`DraftTree`, `TargetOutput`, `Verdict`, `DecodeState`, `AcceptanceStats`) and four verbs. Nothing here knows
which kind of drafter it drives: a chain is a tree, and plain decoding is the tree of one node.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from specdec.drafting.base import Drafter, Prompt
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.verdict import Verdict
from specdec.loop.processing import Processing
from specdec.loop.rules import AcceptanceRule, Limits
from specdec.loop.state import DecodeState
from specdec.loop.timing import PhaseTimer
from specdec.models.target.scores import Scores
from specdec.models.target.target import PREFILL_CHUNK_SIZE, PrefillOutput, Target, TargetOutput

__all__ = ["Generation", "NonFiniteLogitsError", "OnStep", "StepOutput", "StepReport"]


class NonFiniteLogitsError(RuntimeError):
    """The target's logits are NaN, so that no token can be chosen."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed, on the device.

    Attributes:
        path: [B, P] int32 accepted nodes from the root, -1 padded; new token i was decided by the logits at node
            `path[i]`.
        scores: the target's at every node, as they came; `scores.logits` are [B, N, V].
        processed: the same as the acceptance rule saw them.
        tree: what was proposed; None of the prompt's pass.
    """

    path: torch.Tensor
    scores: Scores
    processed: Scores
    tree: DraftTree | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, for code on the host.

    Attributes:
        new: per row the tokens that it emitted; empty for a row that had finished.
        output: what it computed; None for code that reads no logits.
    """

    new: list[list[int]]
    output: StepOutput | None


OnStep = Callable[[StepReport], Mapping[int, int] | None]
"""Called after prefill and after every step. To end rows it returns, by row, how many of the new tokens to keep."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the steps of one generation work with: who decides, on which memory, by which settings.

    Attributes:
        target: the target, hooked while anything here runs.
        drafter: bound to it, with memory allocated.
        rule: the acceptance rule.
        state: everything that changes from step to step, beside what the drafter keeps.
        stop_tokens: [E] int32, or None.
        processing: what happens to the target's logits before tokens are chosen.
        timer: of the phases of a step.
        needs_logits: whether anyone reads logits; otherwise the best token of every node is enough.
    """

    target: Target
    drafter: Drafter
    rule: AcceptanceRule
    state: DecodeState
    stop_tokens: torch.Tensor | None
    processing: Processing
    timer: PhaseTimer
    needs_logits: bool

    def begin(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        seeds: torch.Tensor,
        *,
        prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
    ) -> StepOutput:
        """Run the prompt, start the drafter and emit the first token; arguments as of `DecodeState.begin`.

        The target reads `prefill_chunk_size` tokens of every row at a time, and the drafter after it.
        """
        self.state.begin(prompt, max_new_tokens, seeds, self.processing.settings)
        (last,) = deque(
            self.read(prompt, prefill_chunk_size), maxlen=1
        )  # what is said of a chunk is gone with the next
        return self.emit_first(last)

    def read(self, prompt: Prompt, chunk_size: int) -> Iterator[PrefillOutput]:
        """Run the prompt and start the drafter, chunk by chunk; what the target says is whole with the last one."""
        tokens, lengths = prompt.tokens, prompt.lengths
        for output in self.target.prefill_chunks(tokens, lengths, self.state.cache, chunk_size=chunk_size):
            self.drafter.start(prompt, output)
            yield output

    def emit_first(self, output: PrefillOutput) -> StepOutput:
        """Emit the first token, which the target says at the end of the prompt."""
        state = self.state
        scores = self._scores(output)
        processed = self._process(scores, None)
        root = self.target.broadcast_from_first(self.rule.first(processed, state.uniforms))
        is_first = torch.zeros_like(root)
        verdict = Verdict(is_first[:, None], torch.where(state.budget > 0, is_first, -1), root, root[:, None])
        state.emit(verdict, is_first, scores.has_nan, self.stop_tokens, grows=False)
        return StepOutput(verdict.path, scores, processed)

    def step(self, way: int = 0) -> StepOutput:
        """One step, in one of the drafter's ways. Emits `num_accepted + 1` tokens per running row.

        Without `Room.may_ask` it never asks the device for anything, and its shapes do not depend on data: the loop may
        run it as it is, or capture it once and replay it.
        """
        state = self.state
        self.drafter.take(way)
        with self.timer.phase("draft"):
            choose = self.rule.chooser(self.processing.law(state.settings), state.uniforms)
            tree = self.target.broadcast_from_first(self.drafter.draft(state.root, choose))
            tree = tree.cut() if state.room.may_ask else tree
        with self.timer.phase("score"):
            output = self.target.score(tree.tokens, tree.depth, tree.ancestors, state.cache)
            scores = self._scores(output)
            has_nan = scores.has_nan
        with self.timer.phase("verify"):
            processed = self._process(scores, tree)
            limits = Limits(state.budget, self.stop_tokens, self.target.backend)
            verdict = self.target.broadcast_from_first(self.rule.verify(tree, processed, limits, state.uniforms))
        with self.timer.phase("commit"):
            state.cache.compact(verdict.path, verdict.num_accepted)
            self.drafter.commit(verdict, output)
            state.emit(verdict, tree.deepest, has_nan, self.stop_tokens, grows=True)
        return StepOutput(verdict.path, scores, processed, tree)

    def _scores(self, output: TargetOutput | PrefillOutput) -> Scores:
        """The target's, with their logits written now if anyone will read them: then nothing is found without them."""
        return Scores.of(output.scores.logits) if self.needs_logits else output.scores

    def _process(self, scores: Scores, tree: DraftTree | None) -> Scores:
        """What the acceptance rule sees."""
        if self.processing.is_idle:
            return scores
        state = self.state
        return Scores.of(self.processing(scores.logits, tree, state.text, state.budget, state.settings))
