"""The decoding loop: draft -> score -> verify -> commit. Read this file first.

Five nouns (`DraftTree`, `TargetOutput`, `Verdict`, `DecodeState`, `AcceptanceStats`) and four verbs. Nothing here knows
which kind of drafter it drives: a chain is a tree, and plain decoding is the tree of one node.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.acceptance import AcceptanceRule, AcceptanceStats, Greedy
from specdec.candidates import Choose, TopK
from specdec.draft_tree import DraftTree
from specdec.drafters.base import Drafter, Prompt
from specdec.drafters.none import NoDrafter
from specdec.kernels.launch import Backend
from specdec.kernels.verdict import Verdict
from specdec.models.cache import KVCache
from specdec.models.target import Target
from specdec.timing import PhaseTimer

__all__ = ["DecodeResult", "DecodeState", "Decoder", "NonFiniteLogitsError"]


class NonFiniteLogitsError(RuntimeError):
    """The target's logits are NaN, so that no token can be chosen."""


@dataclass(slots=True)
class DecodeState:
    """Everything that changes from step to step, on the device.

    Attributes:
        cache: the target's keys and values, with the committed length of each row.
        root: [B] int32, last emitted token, not yet in the cache.
        budget: [B] int32, tokens that each row may still emit; 0 for a finished row.
        output: [B, max_new_tokens + slack] int32, emitted tokens, -1 padded.
        num_output: [B] int64, emitted tokens per row.
        first_nan_step: [] int32, the first step whose logits held NaN (0 is prefill); -1 if there is none.
    """

    cache: KVCache
    root: torch.Tensor
    budget: torch.Tensor
    output: torch.Tensor
    num_output: torch.Tensor
    first_nan_step: torch.Tensor

    def emit(self, tokens: torch.Tensor, counts: torch.Tensor, stop_tokens: torch.Tensor | None) -> None:
        """Append [B, P] tokens, of which `counts [B]` are real, and end the rows that emitted a stop token."""
        columns = self.num_output[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.output.scatter_(1, columns, tokens)  # what is written past a row's count is overwritten by its next step
        self.num_output += counts
        self.budget -= counts
        if stop_tokens is not None:
            stopped = (self.root[:, None] == stop_tokens).any(1)
            self.budget.masked_fill_(stopped, 0)

    def note_nan(self, logits: torch.Tensor, step: int) -> None:
        """Remember the first step whose logits hold NaN."""
        # a sum is NaN if a summand is; in fp32 finite logits cannot overflow it to inf - inf
        is_new = torch.isnan(logits.sum(dtype=torch.float32)) & (self.first_nan_step < 0)
        self.first_nan_step.masked_fill_(is_new, step)


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """New tokens of every row, and how they came about.

    Attributes:
        tokens: per row, the emitted tokens.
        stats: what the steps accepted and how long they took.
    """

    tokens: list[list[int]]
    stats: AcceptanceStats


class Decoder:
    """A target, a drafter and an acceptance rule, ready to decode; reusable from call to call.

    Args:
        model: the target: a transformers causal LM or a `Target`.
        drafter: what proposes tokens; None for plain decoding.
        acceptance: the acceptance rule; greedy by default.
        backend: what runs the kernels; by default decided by the device. A `Target` has decided already.

    Raises:
        TypeError, ValueError, NotImplementedError: the model is not supported, or the drafter does not fit it.
    """

    def __init__(
        self,
        model: PreTrainedModel | Target,
        drafter: Drafter | None = None,
        *,
        acceptance: AcceptanceRule | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.target = model if isinstance(model, Target) else Target(model, backend=backend)
        if backend not in (None, self.target.backend):
            raise ValueError(f"backend: expected None or the target's {self.target.backend!r}, got {backend!r}")
        self.drafter = NoDrafter() if drafter is None else drafter
        self.backend = self.target.backend
        self.acceptance: AcceptanceRule = Greedy(backend=self.backend) if acceptance is None else acceptance
        self.choose: Choose = TopK()
        window = self.target.sliding_window
        if window is not None and self.drafter.shape.max_depth >= window:
            raise ValueError(
                f"tree: expected a depth below the target's sliding window of {window}, "
                f"got {self.drafter.shape.max_depth}"
            )
        self.drafter.bind(self.target)

    def decode(
        self,
        prompts: Sequence[torch.Tensor],
        max_new_tokens: int,
        *,
        stop_tokens: Sequence[int] = (),
        on_tokens: Callable[[list[int], int], None] | None = None,
    ) -> DecodeResult:
        """Decode a batch of prompts.

        Args:
            prompts: one 1-D int64 tensor of at least one token per row, without padding.
            max_new_tokens: most tokens that a row may emit, at least 1.
            stop_tokens: tokens after which a row ends; the stop token itself is emitted.
            on_tokens: called with each step's new tokens of row 0, and how many of them are accepted draft tokens
                (the first of them); costs a synchronisation per step.

        Raises:
            ValueError: an empty prompt, or more tokens than fit into the model's context.
            NonFiniteLogitsError: the target's logits are NaN; the message says at which step.
        """
        self.check_prompts(prompts, max_new_tokens)
        prompt = self._pad(prompts, max_new_tokens)
        stops = torch.tensor(stop_tokens, dtype=torch.int32, device=self.target.device) if stop_tokens else None
        timer = PhaseTimer(self.target.device)
        emitted: list[torch.Tensor] = []
        reach: list[torch.Tensor] = []
        with _without_autograd(self.target.device), self.target.hooked(), self.drafter.session():
            with timer.phase("prefill"):
                state = self._prefill(prompt, max_new_tokens, stops)
            if on_tokens is not None:
                self._check_finite(state)
                with torch.inference_mode(False):  # the caller's code is none of ours
                    on_tokens([int(state.root[0])], 0)
            while self._is_running(state):
                verdict, tree = self.step(state, stops, timer, step=len(emitted) + 1)
                emitted.append(verdict.num_emitted)
                reach.append(tree.reach)
                if on_tokens is not None:
                    self._check_finite(state)
                    new = verdict.emitted[0][: int(verdict.num_emitted[0])].tolist()
                    if new:
                        with torch.inference_mode(False):
                            on_tokens(new, len(new) - 1)
        stats = AcceptanceStats(
            *_per_row(emitted, reach, batch_size=len(prompts)),
            lossless=self.acceptance.lossless,
            times_ms=timer.times_ms(),
            num_target_passes=len(emitted),
        )
        counts = state.num_output.tolist()
        return DecodeResult([row[:count] for row, count in zip(state.output.tolist(), counts, strict=True)], stats)

    def step(
        self, state: DecodeState, stop_tokens: torch.Tensor | None, timer: PhaseTimer, step: int
    ) -> tuple[Verdict, DraftTree]:
        """One step. Emits `num_accepted + 1` tokens per running row."""
        with timer.phase("draft"):
            tree = self.drafter.draft(state.root, state.cache.lengths, self.choose)
        with timer.phase("score"):
            output = self.target.score(tree.tokens, tree.depth, tree.ancestors, state.cache)
        with timer.phase("verify"):
            verdict = self.acceptance.verify(tree, output.logits, state.budget, stop_tokens)
            state.note_nan(output.logits, step)
        with timer.phase("commit"):
            state.cache.commit(verdict.path, verdict.num_accepted)
            self.drafter.commit(verdict, output)
            state.root = verdict.next_root
            state.emit(verdict.emitted, verdict.num_emitted, stop_tokens)
        return verdict, tree

    def check_prompts(self, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> None:
        """Raise ValueError for prompts that `decode` would refuse."""
        lengths = [int(row.shape[0]) if row.ndim == 1 else 0 for row in prompts]
        if min(lengths, default=0) < 1:
            shapes = [list(row.shape) for row in prompts]
            raise ValueError(f"prompts: expected 1-D tensors of at least one token, got shapes {shapes}")
        room = self.target.max_positions - max(lengths)
        if not 1 <= max_new_tokens <= room:
            raise ValueError(
                f"max_new_tokens: expected 1 to {max(room, 0)} after a prompt of {max(lengths)} tokens "
                f"(the model's context is {self.target.max_positions}), got {max_new_tokens}"
            )

    def _pad(self, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> Prompt:
        """Right-pad the prompts onto the target's device."""
        lengths = [int(row.shape[0]) for row in prompts]
        tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for padded, row in zip(tokens, prompts, strict=True):
            padded[: row.shape[0]] = row
        return Prompt(
            tokens=tokens.to(self.target.device),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=self.target.device),
            max_length=max(lengths) + max_new_tokens,
        )

    def _prefill(self, prompt: Prompt, max_new_tokens: int, stop_tokens: torch.Tensor | None) -> DecodeState:
        """Run the prompt, start the drafter and emit the first token."""
        device, batch_size = self.target.device, prompt.lengths.shape[0]
        shape = self.drafter.shape
        cache = self.target.new_cache(batch_size, prompt.max_length + shape.num_nodes)
        output = self.target.prefill(prompt.tokens, prompt.lengths, cache)
        self.drafter.start(prompt, output)
        root = self.acceptance.first(output.logits)
        state = DecodeState(
            cache=cache,
            root=root,
            budget=torch.full((batch_size,), max_new_tokens, dtype=torch.int32, device=device),
            output=torch.full((batch_size, max_new_tokens + shape.max_depth + 1), -1, dtype=torch.int32, device=device),
            num_output=torch.zeros(batch_size, dtype=torch.int64, device=device),
            first_nan_step=torch.full((), -1, dtype=torch.int32, device=device),
        )
        state.note_nan(output.logits[:, None], step=0)
        state.emit(root[:, None], torch.ones_like(root), stop_tokens)
        return state

    def _is_running(self, state: DecodeState) -> bool:
        """Whether any row may still emit; one small copy to the host."""
        self._check_finite(state)
        return bool(state.budget.any())

    @staticmethod
    def _check_finite(state: DecodeState) -> None:
        step = int(state.first_nan_step)
        if step >= 0:
            where = "while the prompt was run (step 0)" if step == 0 else f"at step {step}"
            raise NonFiniteLogitsError(f"model: expected finite logits, got NaN {where}")


def _without_autograd(device: torch.device) -> AbstractContextManager[Any]:
    """No gradients; on a CPU also none of autograd's bookkeeping, a twentieth of the time of a small model's pass.

    Elsewhere it costs nothing, and libraries of quantized layers may keep tensors that they make in the first pass.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()


def _per_row(
    emitted: list[torch.Tensor], reach: list[torch.Tensor], batch_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Turn per-step [B] counts into lists per row, leaving out the steps after a row had finished."""
    rows_emitted: list[list[int]] = [[] for _ in range(batch_size)]
    rows_reach: list[list[int]] = [[] for _ in range(batch_size)]
    if emitted:
        for step_emitted, step_reach in zip(torch.stack(emitted).tolist(), torch.stack(reach).tolist(), strict=True):
            for row, count in enumerate(step_emitted):
                if count:
                    rows_emitted[row].append(count)
                    rows_reach[row].append(step_reach[row])
    return rows_emitted, rows_reach
