"""The decoding loop: draft -> score -> verify -> commit. Read this file first.

Five nouns (`DraftTree`, `TargetOutput`, `Verdict`, `DecodeState`, `AcceptanceStats`) and four verbs. Nothing here knows
which kind of drafter it drives: a chain is a tree, and plain decoding is the tree of one node.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.common.randomness import row_seeds
from specdec.drafters.none import NoDrafter
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.launch import Backend
from specdec.loop.captured import CapturedStep, CapturedSteps, CudaGraphs, Engine, new_drafter
from specdec.loop.memory import Description, MemoryPlan, weights_of
from specdec.loop.processing import Processing
from specdec.loop.rules import AcceptanceRule, AcceptanceStats, Greedy, Limits
from specdec.loop.state import DecodeState
from specdec.loop.timing import PhaseTimer
from specdec.models.common.cache import KVCache
from specdec.models.target.scores import Scores
from specdec.models.target.target import PrefillOutput, Target, TargetOutput

__all__ = ["DecodeResult", "DecodeState", "Decoder", "NonFiniteLogitsError", "OnStep", "StepReport", "without_autograd"]


class NonFiniteLogitsError(RuntimeError):
    """The target's logits are NaN, so that no token can be chosen."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, for code on the host.

    Attributes:
        new: per row the tokens that it emitted; empty for a row that had finished.
        path: [B, P] int32 accepted nodes from the root; new token i was decided by the logits at node `path[i]`.
        scores: the target's at every node, as they came; `scores.logits` are [B, N, V].
        processed: the same as the acceptance rule saw them.
    """

    new: list[list[int]]
    path: torch.Tensor
    scores: Scores
    processed: Scores


OnStep = Callable[[StepReport], Mapping[int, int] | None]
"""Called after prefill and after every step. To end rows it returns, by row, how many of the new tokens to keep."""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """New tokens of every row, and how they came about.

    Attributes:
        tokens: per row, the emitted tokens.
        stats: what the steps accepted and how long they took.
        cache: keys and values of all tokens but each row's last; its own memory, which no later call overwrites. None
            if it was not asked for.
    """

    tokens: list[list[int]]
    stats: AcceptanceStats
    cache: KVCache | None


class Decoder:
    """A target, a drafter and an acceptance rule, ready to decode; reusable from call to call.

    Args:
        model: the target: a transformers causal LM or a `Target`.
        drafter: what proposes tokens; None for plain decoding.
        acceptance: the acceptance rule; greedy by default.
        backend: what runs the kernels; by default decided by the device. A `Target` has decided already.
        capture: on a GPU, capture a step and replay it wherever no code on the host has to see every step. False for
            the eager loop in any case; another `Engine` in place of CUDA graphs is for tests.

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
        capture: bool | Engine = True,
    ) -> None:
        self.target = model if isinstance(model, Target) else Target(model, backend=backend)
        if backend not in (None, self.target.backend):
            raise ValueError(f"backend: expected None or the target's {self.target.backend!r}, got {backend!r}")
        self.drafter = NoDrafter() if drafter is None else drafter
        if not isinstance(self.drafter, Drafter):
            raise TypeError(f"drafter: expected a Drafter, as specdec.load_drafter gives, got {drafter!r}")
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
        if capture is True:
            on_gpu = self.target.device.type == "cuda" and self.backend == "triton" and self.target.sharding is None
            capture = CudaGraphs(self.target.device) if on_gpu else False
        self.captured: CapturedSteps | None = None
        if not isinstance(capture, bool):
            self.captured = CapturedSteps(capture, self.target.max_positions)
        self._addresses: list[int] = []

    def decode(
        self,
        prompts: Sequence[torch.Tensor],
        max_new_tokens: int,
        *,
        stop_tokens: Sequence[int] = (),
        seed: int | Sequence[int] | torch.Generator | None = None,
        processing: Processing | None = None,
        on_step: OnStep | None = None,
        reads_logits: bool = True,
        keep_cache: bool = False,
    ) -> DecodeResult:
        """Decode a batch of prompts.

        The first call of its sizes captures a step where steps are captured, which takes a moment; see `warmup`.

        Args:
            prompts: one 1-D int64 tensor of at least one token per row, without padding.
            max_new_tokens: most tokens that a row may emit, at least 1.
            stop_tokens: tokens after which a row ends; the stop token itself is emitted.
            seed: of the random numbers, as in `specdec.common.randomness.row_seeds`; greedy decoding needs none.
            processing: what happens to the target's logits before tokens are chosen.
            on_step: called after prefill and after every step; costs a synchronisation per step, and captures nothing.
            reads_logits: whether `on_step` reads logits; greedy decoding writes none for one that does not.
            keep_cache: return the keys and values, which after captured steps takes a copy of them.

        Raises:
            ValueError: an empty prompt, or more tokens than fit into the model's context.
            NonFiniteLogitsError: the target's logits are NaN; the message says at which step.
        """
        self.check_prompts(prompts, max_new_tokens)
        device, num_rows = self.target.device, len(prompts)
        seeds = row_seeds(seed if self.acceptance.samples or seed is not None else 0, num_rows)
        seeds = self.target.agree(seeds.to(device))
        stops = torch.tensor(stop_tokens, dtype=torch.int32, device=device) if stop_tokens else None
        processing = Processing.none() if processing is None else processing
        timer = PhaseTimer(device)
        max_length = max(map(len, prompts)) + max_new_tokens
        with self._running():
            captured = None
            if on_step is None:
                captured = self._find_captured(
                    num_rows, max_length, processing, len(stop_tokens), timer, may_capture=max_new_tokens > 1
                )
            rows = num_rows if captured is None else captured.state.room.batch_size
            prompt = Prompt.padded(prompts, rows, max_length, device)
            with timer.phase("prefill"):
                if captured is None:
                    drafter = self.drafter
                    state = self._new_state(Room(rows, max_length, prompt.tokens.shape[1], max_new_tokens), device)
                    drafter.allocate(state.room, device)
                else:
                    state, drafter = captured.state, captured.drafter
                needs_logits = self._needs_logits(processing) or (on_step is not None and reads_logits)
                call = _Call(drafter, stops, processing, timer, needs_logits)
                state.begin(prompt, max_new_tokens, seeds)
                report = self._prefill(state, prompt, call)
            if captured is None:
                self._run_eagerly(state, call, report, on_step)
            else:
                self._replay(captured, stops, max_new_tokens - 1, timer)
            num_emitted, reach, num_steps = state.counts(num_rows)
            stats = AcceptanceStats(
                num_emitted,
                reach,
                lossless=self.acceptance.lossless,
                times_ms=timer.times_ms(),
                num_target_passes=num_steps,
                captured=captured is not None,
                spans_ms=timer.spans_ms(),
            )
            tokens = state.tokens(num_rows)
            cache = None
            if keep_cache:
                cache = state.cache if captured is None else state.cache.copy_of(num_rows)
        return DecodeResult(tokens, stats, cache)

    def warmup(
        self,
        *,
        batch_size: int = 1,
        max_length: int,
        num_stop_tokens: int = 0,
        processing: Processing | None = None,
    ) -> bool:
        """Capture a step ahead of the first call that needs it.

        Args:
            batch_size: rows of the calls to come.
            max_length: most tokens of a row, prompt and new ones together; shorter calls use the same step.
            num_stop_tokens: how many stop tokens they give.
            processing: one with the same settings.

        Returns:
            Whether there is a captured step now; False where steps run eagerly.
        """
        if not 2 <= max_length <= self.target.max_positions:
            raise ValueError(f"max_length: expected 2 to {self.target.max_positions}, got {max_length}")
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        processing = Processing.none() if processing is None else processing
        with self._running():
            timer = PhaseTimer(self.target.device, enabled=False)
            return self._find_captured(batch_size, max_length, processing, num_stop_tokens, timer) is not None

    def release(self) -> None:
        """Free all captured steps and the memory that they hold."""
        if self.captured is not None:
            self.captured.release()

    def describe(self, *, batch_size: int = 1, max_length: int | None = None) -> Description:
        """The memory that calls of these sizes take, and what is captured; nothing is allocated.

        Args:
            batch_size: rows.
            max_length: most tokens of a row, prompt and new ones together; by default the model's context.
        """
        length = self.target.max_positions if max_length is None else max_length
        room = Room(batch_size, length, length - 1, length - 1)
        if self.captured is not None:
            room = self.captured.room(batch_size, length)
        meta = torch.device("meta")
        plan = MemoryPlan.of(self.target, new_drafter(self.drafter, room, meta), self._new_state(room, meta))
        captures = self.captured is not None and not self.captured.cannot_capture
        return Description(plan, () if self.captured is None else tuple(self.captured.rooms()), captures)

    def step(self, state: DecodeState, call: "_Call") -> "_Report":
        """One step. Emits `num_accepted + 1` tokens per running row.

        It never asks the device for anything, and its shapes do not depend on data: the loop may run it as it is, or
        capture it once and replay it.
        """
        state.uniforms.next_step()
        with call.timer.phase("draft"):
            choose = self.acceptance.chooser(call.processing.law, state.uniforms)
            tree = self.target.agree(call.drafter.draft(state.root, choose))
        with call.timer.phase("score"):
            output = self.target.score(tree.tokens, tree.depth, tree.ancestors, state.cache)
            scores = call.scores(output)
            has_nan = scores.has_nan
        with call.timer.phase("verify"):
            processed = call.process(scores, tree, state)
            limits = Limits(state.budget, call.stop_tokens, self.backend)
            verdict = self.target.agree(self.acceptance.verify(tree, processed, limits, state.uniforms))
            state.note_nan(has_nan)
        with call.timer.phase("commit"):
            state.cache.commit(verdict.path, verdict.num_accepted)
            call.drafter.commit(verdict, output)
            state.emit_step(verdict, tree.reach, call.stop_tokens)
        return _Report(verdict.emitted, verdict.num_emitted, verdict.path, scores, processed)

    def check_prompts(self, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> None:
        """Raise TypeError or ValueError for prompts that `decode` would refuse."""
        for row in prompts:
            if not isinstance(row, torch.Tensor) or row.is_floating_point() or row.dtype == torch.bool:
                kind = f"{row.dtype} values" if isinstance(row, torch.Tensor) else type(row).__name__
                raise TypeError(f"prompts: expected 1-D tensors of token ids, got {kind}")
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

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Hold the models as decoding needs them."""
        with without_autograd(self.target.device), self.target.hooked(), self.drafter.session():
            yield

    def _run_eagerly(self, state: DecodeState, call: "_Call", report: "_Report", on_step: OnStep | None) -> None:
        """Run steps until all rows have finished; `report` is that of prefill."""
        if on_step is not None:
            self._tell(state, report, on_step)
        while self._is_running(state):
            report = self.step(state, call)
            if on_step is not None:
                self._tell(state, report, on_step)

    def _find_captured(
        self,
        batch_size: int,
        max_length: int,
        processing: Processing,
        num_stop_tokens: int,
        timer: PhaseTimer,
        *,
        may_capture: bool = True,
    ) -> CapturedStep | None:
        """A captured step for a call, None if its steps run eagerly."""
        captured, signature = self.captured, processing.signature
        if captured is None or captured.cannot_capture or signature is None:
            return None
        addresses = [tensor.data_ptr() for tensor in (*self.target.model.parameters(), *weights_of(self.drafter))]
        if addresses != self._addresses:  # a model was moved: recordings read memory that is not its own any more
            captured.release()
            self._addresses = addresses
        # the rule itself is part of the key: another one at the same address would be another key
        sizes = (batch_size, max_length, (self.acceptance, signature), num_stop_tokens)
        found = captured.find(*sizes)
        if found is not None or not may_capture:
            return found

        def begin(state: DecodeState, drafter: Drafter, stops: torch.Tensor | None) -> tuple[Callable[[], Any], Any]:
            """A generation that is thrown away."""
            timer = PhaseTimer(self.target.device, enabled=False)
            call = _Call(drafter, stops, processing, timer, self._needs_logits(processing))
            rows = state.room.batch_size
            prompt = Prompt.padded([], rows, state.room.max_length, self.target.device)
            state.begin(prompt, state.room.max_new_tokens, torch.zeros_like(state.uniforms.seeds))
            self._prefill(state, prompt, call)
            return functools.partial(self.step, state, call), call

        try:
            with timer.phase("capture"):
                return captured.capture(*sizes, self._lay_out, begin)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if not (isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)):
                raise
            plan = self.describe(batch_size=batch_size, max_length=max_length).plan
            raise type(error)(
                f"memory: expected {plan.total_bytes / 2**30:.2f} GiB on {self.target.device} beside the results of "
                f"passes, got {str(error).splitlines()[0]}; lower max_new_tokens, the batch or the tree\n{plan}"
            ) from error

    def _replay(self, captured: CapturedStep, stops: torch.Tensor | None, max_steps: int, timer: PhaseTimer) -> None:
        """Replay a captured step for a generation that has begun."""
        assert self.captured is not None
        if stops is not None and captured.stop_tokens is not None:
            captured.stop_tokens.copy_(stops)
        with timer.phase("steps"):
            self.captured.run(captured, max_steps)
        try:
            self._is_running(captured.state)
        except NonFiniteLogitsError:
            self.captured.release()  # the cache holds NaN, which masked lanes of later calls would read
            raise

    def _needs_logits(self, processing: Processing) -> bool:
        """Whether choosing tokens takes logits; otherwise the best token of every node is enough."""
        return self.acceptance.needs_logits or not processing.is_idle

    def _lay_out(self, room: Room) -> tuple[DecodeState, Drafter]:
        """Memory for captured steps."""
        return self._new_state(room, self.target.device), new_drafter(self.drafter, room, self.target.device)

    def _new_state(self, room: Room, device: torch.device) -> DecodeState:
        shape = self.drafter.shape
        return DecodeState.new(self.target, room, num_nodes=shape.num_nodes, max_depth=shape.max_depth, device=device)

    def _prefill(self, state: DecodeState, prompt: Prompt, call: "_Call") -> "_Report":
        """Run the prompt, start the drafter and emit the first token."""
        output = self.target.prefill(prompt.tokens, prompt.lengths, state.cache)
        call.drafter.start(prompt, output)
        scores = call.scores(output)
        processed = call.process(scores, None, state)
        root = self.target.agree(self.acceptance.first(processed, state.uniforms))
        state.note_nan(scores.has_nan, is_prefill=True)
        counts = (state.budget > 0).int()
        state.emit(root, root[:, None], counts, call.stop_tokens)
        return _Report(root[:, None], counts, torch.zeros_like(root)[:, None], scores, processed)

    def _tell(self, state: DecodeState, report: "_Report", on_step: OnStep) -> None:
        """Report to the host and cut the rows that it ends."""
        _check_finite(int(state.progress[1]))
        counts = report.counts.tolist()
        new = [row[:count] for row, count in zip(report.emitted.tolist(), counts, strict=True)]
        with torch.inference_mode(False), torch.no_grad():  # the caller's code is none of ours
            kept = on_step(StepReport(new, report.path, report.scores, report.processed)) or {}
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
    needs_logits: bool

    def scores(self, output: TargetOutput | PrefillOutput) -> Scores:
        """The target's, with their logits written now if anyone will read them: then nothing is found without them."""
        return Scores.of(output.scores.logits) if self.needs_logits else output.scores

    def process(self, scores: Scores, tree: DraftTree | None, state: DecodeState) -> Scores:
        """What the acceptance rule sees."""
        if self.processing.is_idle:
            return scores
        history = state.history() if self.processing.needs_history else None
        return Scores.of(self.processing(scores.logits, tree, history, state.budget))


@dataclass(frozen=True, slots=True)
class _Report:
    """A `StepReport` that is still on the device."""

    emitted: torch.Tensor
    counts: torch.Tensor
    path: torch.Tensor
    scores: Scores
    processed: Scores


def without_autograd(device: torch.device) -> AbstractContextManager[Any]:
    """No gradients; on a CPU also none of autograd's bookkeeping, a twentieth of the time of a small model's pass.

    Elsewhere it costs nothing, and libraries of quantized layers may keep tensors that they make in the first pass.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()


def _check_finite(first_nan_step: int) -> None:
    if first_nan_step >= 0:
        where = "while the prompt was run (step 0)" if first_nan_step == 0 else f"at step {first_nan_step}"
        raise NonFiniteLogitsError(f"model: expected finite logits, got NaN {where}")
