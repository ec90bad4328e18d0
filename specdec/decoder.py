"""The decoding loop: draft -> score -> verify -> commit. Read this file first.

Five nouns (`DraftTree`, `TargetOutput`, `Verdict`, `DecodeState`, `AcceptanceStats`) and four verbs. Nothing here knows
which kind of drafter it drives: a chain is a tree, and plain decoding is the tree of one node.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.acceptance import AcceptanceRule, AcceptanceStats, Greedy, Limits
from specdec.draft_tree import DraftTree
from specdec.drafters.base import Drafter, Prompt
from specdec.drafters.none import NoDrafter
from specdec.kernels.launch import Backend
from specdec.kernels.verdict import Verdict
from specdec.models.cache import KVCache
from specdec.models.target import Target
from specdec.processing import Processing
from specdec.randomness import Uniforms, row_seeds
from specdec.timing import PhaseTimer

__all__ = ["DecodeResult", "DecodeState", "Decoder", "NonFiniteLogitsError", "OnStep", "StepReport", "without_autograd"]


class NonFiniteLogitsError(RuntimeError):
    """The target's logits are NaN, so that no token can be chosen."""


@dataclass(slots=True)
class DecodeState:
    """Everything that changes from step to step, on the device.

    Attributes:
        prompt: the prompts.
        cache: the target's keys and values, with the committed length of each row.
        uniforms: the random numbers of this call.
        root: [B] int32, last emitted token, not yet in the cache.
        budget: [B] int32, tokens that each row may still emit; 0 for a finished row.
        output: [B, max_new_tokens + slack] int32, emitted tokens, -1 padded.
        num_output: [B] int64, emitted tokens per row.
        first_nan_step: [] int32, the first step whose logits held NaN (0 is prefill); -1 if there is none.
    """

    prompt: Prompt
    cache: KVCache
    uniforms: Uniforms
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

    def history(self) -> torch.Tensor:
        """[B, H] int32: the tokens before the root, -1 where there is none."""
        prompt = self.prompt
        columns = torch.arange(prompt.tokens.shape[1], device=prompt.tokens.device)
        text = torch.where(columns < prompt.lengths[:, None], prompt.tokens, -1).int()
        emitted = torch.arange(self.output.shape[1], device=self.output.device)
        return torch.cat((text, torch.where(emitted < self.num_output[:, None] - 1, self.output, -1)), 1)

    def cut(self, row: int, num_dropped: int) -> None:
        """End a row, without the last `num_dropped` of the tokens that its last step emitted."""
        kept = int(self.num_output[row]) - num_dropped
        self.output[row, kept:] = -1
        self.num_output[row] = kept
        self.root[row] = self.output[row, kept - 1]
        self.cache.lengths[row] -= num_dropped
        self.budget[row] = 0

    def note_nan(self, logits: torch.Tensor, step: int) -> None:
        """Remember the first step whose logits hold NaN."""
        # a sum is NaN if a summand is; in fp32 finite logits cannot overflow it to inf - inf
        is_new = torch.isnan(logits.sum(dtype=torch.float32)) & (self.first_nan_step < 0)
        self.first_nan_step.masked_fill_(is_new, step)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, for code on the host.

    Attributes:
        new: per row the tokens that it emitted; empty for a row that had finished.
        path: [B, P] int32 accepted nodes from the root; new token i was decided by the logits at node `path[i]`.
        logits: [B, N, V] the target's, as they came.
        processed: [B, N, V] what the acceptance rule saw.
    """

    new: list[list[int]]
    path: torch.Tensor
    logits: torch.Tensor
    processed: torch.Tensor


OnStep = Callable[[StepReport], Mapping[int, int] | None]
"""Called after prefill and after every step. To end rows it returns, by row, how many of the new tokens to keep."""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """New tokens of every row, and how they came about.

    Attributes:
        tokens: per row, the emitted tokens.
        stats: what the steps accepted and how long they took.
        cache: keys and values of all tokens but each row's last.
    """

    tokens: list[list[int]]
    stats: AcceptanceStats
    cache: KVCache


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
        self.acceptance: AcceptanceRule = Greedy() if acceptance is None else acceptance
        self.acceptance.check(self.drafter)
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
        seed: int | Sequence[int] | torch.Generator | None = None,
        processing: Processing | None = None,
        on_step: OnStep | None = None,
    ) -> DecodeResult:
        """Decode a batch of prompts.

        Args:
            prompts: one 1-D int64 tensor of at least one token per row, without padding.
            max_new_tokens: most tokens that a row may emit, at least 1.
            stop_tokens: tokens after which a row ends; the stop token itself is emitted.
            seed: of the random numbers, as in `specdec.randomness.row_seeds`; greedy decoding needs none.
            processing: what happens to the target's logits before tokens are chosen.
            on_step: called after prefill and after every step; costs a synchronisation per step.

        Raises:
            ValueError: an empty prompt, or more tokens than fit into the model's context.
            NonFiniteLogitsError: the target's logits are NaN; the message says at which step.
        """
        self.check_prompts(prompts, max_new_tokens)
        prompt = self._pad(prompts, max_new_tokens)
        seeds = row_seeds(seed if self.acceptance.samples or seed is not None else 0, len(prompts))
        call = _Call(
            torch.tensor(stop_tokens, dtype=torch.int32, device=self.target.device) if stop_tokens else None,
            Processing.none() if processing is None else processing,
            PhaseTimer(self.target.device),
        )
        emitted: list[torch.Tensor] = []
        reach: list[torch.Tensor] = []
        with without_autograd(self.target.device), self.target.hooked(), self.drafter.session():
            with call.timer.phase("prefill"):
                state, report = self._prefill(prompt, max_new_tokens, Uniforms(seeds.to(self.target.device)), call)
            if on_step is not None:
                self._tell(state, report, on_step)
            while self._is_running(state):
                verdict, tree, report = self.step(state, call, step=len(emitted) + 1)
                counts = verdict.num_emitted
                if on_step is not None:
                    counts = counts - self._tell(state, report, on_step)
                emitted.append(counts)
                reach.append(tree.reach)
        stats = AcceptanceStats(
            *_per_row(emitted, reach, batch_size=len(prompts)),
            lossless=self.acceptance.lossless,
            times_ms=call.timer.times_ms(),
            num_target_passes=len(emitted),
        )
        num_output = state.num_output.tolist()
        tokens = [row[:count] for row, count in zip(state.output.tolist(), num_output, strict=True)]
        return DecodeResult(tokens, stats, state.cache)

    def step(self, state: DecodeState, call: "_Call", step: int) -> tuple[Verdict, DraftTree, "_Report"]:
        """One step. Emits `num_accepted + 1` tokens per running row."""
        state.uniforms.next_step()
        with call.timer.phase("draft"):
            choose = self.acceptance.chooser(call.processing.law, state.uniforms)
            tree = self.drafter.draft(state.root, state.cache.lengths, choose)
        with call.timer.phase("score"):
            output = self.target.score(tree.tokens, tree.depth, tree.ancestors, state.cache)
        with call.timer.phase("verify"):
            history = state.history() if call.processing.needs_history else None
            processed = call.processing(output.logits, tree, history, state.budget)
            limits = Limits(state.budget, call.stop_tokens, self.backend)
            verdict = self.acceptance.verify(tree, processed, limits, state.uniforms)
            state.note_nan(output.logits, step)
        with call.timer.phase("commit"):
            state.cache.commit(verdict.path, verdict.num_accepted)
            self.drafter.commit(verdict, output)
            state.root = verdict.next_root
            state.emit(verdict.emitted, verdict.num_emitted, call.stop_tokens)
        return verdict, tree, _Report(verdict.emitted, verdict.num_emitted, verdict.path, output.logits, processed)

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

    def _prefill(
        self, prompt: Prompt, max_new_tokens: int, uniforms: Uniforms, call: "_Call"
    ) -> tuple[DecodeState, "_Report"]:
        """Run the prompt, start the drafter and emit the first token."""
        device, batch_size = self.target.device, prompt.lengths.shape[0]
        shape = self.drafter.shape
        state = DecodeState(
            prompt=prompt,
            cache=self.target.new_cache(batch_size, prompt.max_length + shape.num_nodes),
            uniforms=uniforms,
            root=torch.zeros(batch_size, dtype=torch.int32, device=device),
            budget=torch.full((batch_size,), max_new_tokens, dtype=torch.int32, device=device),
            output=torch.full((batch_size, max_new_tokens + shape.max_depth + 1), -1, dtype=torch.int32, device=device),
            num_output=torch.zeros(batch_size, dtype=torch.int64, device=device),
            first_nan_step=torch.full((), -1, dtype=torch.int32, device=device),
        )
        output = self.target.prefill(prompt.tokens, prompt.lengths, state.cache)
        self.drafter.start(prompt, output)
        logits = output.logits[:, None]
        history = state.history() if call.processing.needs_history else None
        processed = call.processing(logits, None, history, state.budget)
        state.root = self.acceptance.first(processed[:, 0], uniforms)
        state.note_nan(logits, step=0)
        counts = torch.ones_like(state.root)
        state.emit(state.root[:, None], counts, call.stop_tokens)
        path = torch.zeros_like(state.root)[:, None]
        return state, _Report(state.root[:, None], counts, path, logits, processed)

    def _tell(self, state: DecodeState, report: "_Report", on_step: OnStep) -> torch.Tensor:
        """Report to the host and cut the rows that it ends; returns how many tokens each row lost, [B] int32."""
        self._check_finite(state)
        counts = report.counts.tolist()
        new = [row[:count] for row, count in zip(report.emitted.tolist(), counts, strict=True)]
        with torch.inference_mode(False), torch.no_grad():  # the caller's code is none of ours
            kept = on_step(StepReport(new, report.path, report.logits, report.processed)) or {}
        dropped = torch.zeros_like(report.counts)
        for row, count in kept.items():
            dropped[row] = counts[row] - count
            state.cut(row, counts[row] - count)
        return dropped

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


@dataclass(frozen=True, slots=True)
class _Call:
    """What stays the same during one call of `decode`."""

    stop_tokens: torch.Tensor | None
    processing: Processing
    timer: PhaseTimer


@dataclass(frozen=True, slots=True)
class _Report:
    """A `StepReport` that is still on the device."""

    emitted: torch.Tensor
    counts: torch.Tensor
    path: torch.Tensor
    logits: torch.Tensor
    processed: torch.Tensor


def without_autograd(device: torch.device) -> AbstractContextManager[Any]:
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
