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
from specdec.decode_state import DecodeState
from specdec.drafters.base import Drafter, Prompt, Room
from specdec.drafters.none import NoDrafter
from specdec.kernels.launch import Backend
from specdec.models.cache import KVCache
from specdec.models.target import Target
from specdec.processing import Processing
from specdec.randomness import row_seeds
from specdec.timing import PhaseTimer

__all__ = ["DecodeResult", "DecodeState", "Decoder", "NonFiniteLogitsError", "OnStep", "StepReport", "without_autograd"]


class NonFiniteLogitsError(RuntimeError):
    """The target's logits are NaN, so that no token can be chosen."""


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
            self.drafter,
            torch.tensor(stop_tokens, dtype=torch.int32, device=self.target.device) if stop_tokens else None,
            Processing.none() if processing is None else processing,
            PhaseTimer(self.target.device),
        )
        room = Room(len(prompts), prompt.max_length, prompt.tokens.shape[1], max_new_tokens)
        with without_autograd(self.target.device), self.target.hooked(), self.drafter.session():
            with call.timer.phase("prefill"):
                state = self._new_state(room, self.target.device)
                call.drafter.allocate(room, self.target.device)
                state.begin(prompt, max_new_tokens, seeds.to(self.target.device))
                report = self._prefill(state, prompt, call)
            if on_step is not None:
                self._tell(state, report, on_step)
            while self._is_running(state):
                report = self.step(state, call)
                if on_step is not None:
                    self._tell(state, report, on_step)
        num_emitted, reach, num_steps = state.counts(len(prompts))
        stats = AcceptanceStats(
            num_emitted,
            reach,
            lossless=self.acceptance.lossless,
            times_ms=call.timer.times_ms(),
            num_target_passes=num_steps,
        )
        return DecodeResult(state.tokens(len(prompts)), stats, state.cache)

    def step(self, state: DecodeState, call: "_Call") -> "_Report":
        """One step. Emits `num_accepted + 1` tokens per running row.

        It never asks the device for anything, and its shapes do not depend on data: the loop may run it as it is, or
        capture it once and replay it.
        """
        state.uniforms.next_step()
        with call.timer.phase("draft"):
            choose = self.acceptance.chooser(call.processing.law, state.uniforms)
            tree = call.drafter.draft(state.root, state.cache.lengths, choose)
        with call.timer.phase("score"):
            output = self.target.score(tree.tokens, tree.depth, tree.ancestors, state.cache)
        with call.timer.phase("verify"):
            history = state.history() if call.processing.needs_history else None
            processed = call.processing(output.logits, tree, history, state.budget > 0)
            limits = Limits(state.budget, call.stop_tokens, self.backend)
            verdict = self.acceptance.verify(tree, processed, limits, state.uniforms)
            state.note_nan(output.logits)
        with call.timer.phase("commit"):
            state.cache.commit(verdict.path, verdict.num_accepted)
            call.drafter.commit(verdict, output)
            state.emit_step(verdict, tree.reach, call.stop_tokens)
        return _Report(verdict.emitted, verdict.num_emitted, verdict.path, output.logits, processed)

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

    def _new_state(self, room: Room, device: torch.device) -> DecodeState:
        shape = self.drafter.shape
        return DecodeState.new(self.target, room, num_nodes=shape.num_nodes, max_depth=shape.max_depth, device=device)

    def _prefill(self, state: DecodeState, prompt: Prompt, call: "_Call") -> "_Report":
        """Run the prompt, start the drafter and emit the first token."""
        output = self.target.prefill(prompt.tokens, prompt.lengths, state.cache)
        call.drafter.start(prompt, output)
        logits = output.logits[:, None]
        history = state.history() if call.processing.needs_history else None
        is_running = state.budget > 0
        processed = call.processing(logits, None, history, is_running)
        root = self.acceptance.first(processed[:, 0], state.uniforms)
        state.note_nan(logits, is_prefill=True)
        counts = is_running.int()
        state.emit(root, root[:, None], counts, call.stop_tokens)
        return _Report(root[:, None], counts, torch.zeros_like(root)[:, None], logits, processed)

    def _tell(self, state: DecodeState, report: "_Report", on_step: OnStep) -> None:
        """Report to the host and cut the rows that it ends."""
        _check_finite(int(state.progress[1]))
        counts = report.counts.tolist()
        new = [row[:count] for row, count in zip(report.emitted.tolist(), counts, strict=True)]
        with torch.inference_mode(False), torch.no_grad():  # the caller's code is none of ours
            kept = on_step(StepReport(new, report.path, report.logits, report.processed)) or {}
        for row, count in kept.items():
            state.cut(row, counts[row] - count)

    def _is_running(self, state: DecodeState) -> bool:
        """Whether any row may still emit; one small copy to the host."""
        is_running, first_nan_step = state.progress.tolist()
        _check_finite(first_nan_step)
        return bool(is_running)


@dataclass(frozen=True, slots=True)
class _Call:
    """What stays the same during one call of `decode`, and for as long as a captured step is replayed."""

    drafter: Drafter
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


def _check_finite(first_nan_step: int) -> None:
    if first_nan_step >= 0:
        where = "while the prompt was run (step 0)" if first_nan_step == 0 else f"at step {first_nan_step}"
        raise NonFiniteLogitsError(f"model: expected finite logits, got NaN {where}")
