"""From prompts to tokens: a `Decoder` lays out memory, runs a generation on it, and captures its step where it pays.

What a step is stands in `step.py`; how it is captured, in `captured.py`.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.common.checks import check_at_least
from specdec.common.defaults import torch_defaults
from specdec.common.randomness import row_seeds
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.kernels.common.launch import Backend
from specdec.kernels.common.scratch import Scratch
from specdec.loop.captured import CapturedStep, CapturedSteps, Memory
from specdec.loop.follower import Follower
from specdec.loop.graphs import CudaGraphs, Graphs
from specdec.loop.memory import Description, MemoryPlan, Places
from specdec.loop.processing import Processing
from specdec.loop.rules import AcceptanceRule, Greedy
from specdec.loop.state import DecodeState
from specdec.loop.stats import AcceptanceStats
from specdec.loop.step import Generation, OnStep
from specdec.loop.timing import PhaseTimer
from specdec.models.common.cache import KVCache
from specdec.models.target.target import PREFILL_CHUNK_SIZE, Target

__all__ = ["DecodeResult", "Decoder", "without_autograd"]


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
            the eager loop in any case; another `Graphs` in place of CUDA graphs is for tests.

    Raises:
        TypeError, ValueError, NotImplementedError: the model is not supported, or the drafter does not fit it.

    Attributes:
        num_bindings: how often the drafter was bound: memory that was laid out before the last time is of no use.
    """

    @torch_defaults()
    def __init__(
        self,
        model: PreTrainedModel | Target,
        drafter: Drafter | None = None,
        *,
        acceptance: AcceptanceRule | None = None,
        backend: Backend | None = None,
        capture: bool | Graphs = True,
    ) -> None:
        self.target = model if isinstance(model, Target) else Target(model, backend=backend)
        if backend not in (None, self.target.backend):
            raise ValueError(f"backend: expected None or the target's {self.target.backend!r}, got {backend!r}")
        self.drafter = NoDrafter() if drafter is None else drafter
        if not isinstance(self.drafter, Drafter):
            raise TypeError(f"drafter: expected a Drafter, as specdec.load_drafter gives, got {drafter!r}")
        self.acceptance: AcceptanceRule = Greedy() if acceptance is None else acceptance
        self.acceptance.check(self.drafter)
        window = self.target.sliding_window
        if window is not None and self.drafter.shape.max_depth >= window:
            raise ValueError(
                f"tree: expected a depth below the target's sliding window of {window}, "
                f"got {self.drafter.shape.max_depth}"
            )
        self.drafter.bind(self.target)
        # a copy with tables of its own: the drafter may be bound to another target meanwhile
        self.drafter = copy.copy(self.drafter)
        self.scratch = Scratch()  # recordings read its addresses: it lives as long as the decoder does
        self._capture = capture
        self._set_up()

    def _set_up(self) -> None:
        """Make what belongs to the target's device."""
        target, capture = self.target, self._capture
        self.backend = target.backend
        self._rule = self.acceptance.prepared(self.drafter.shape, target.device)
        self._rule_device = target.device
        if capture is True:
            on_gpu = target.device.type == "cuda" and target.backend == "triton" and target.sharding is None
            capture = CudaGraphs(target.device) if on_gpu else False
        self.captured: CapturedSteps | None = None
        if not isinstance(capture, bool):
            self.captured = CapturedSteps(capture, target.max_positions)
        self._places: Places | None = None
        self._has_run = False
        self.num_bindings = 0

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
        prefill_chunk_size: int | None = None,
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
            on_step: called after prefill and after every step, with a captured step one step later.
            reads_logits: whether `on_step` reads what a step computed beside its tokens. That captures nothing, costs a
                synchronisation per step, and writes logits where greedy decoding would write none.
            prefill_chunk_size: prompt tokens per row that one pass reads, 2048 by default; what a long prompt
                takes beside the cache grows with this and not with its length.
            keep_cache: return the keys and values, which after captured steps takes a copy of them.

        Raises:
            ValueError: an empty prompt, or more tokens than fit into the model's context.
            torch.OutOfMemoryError: the device has no room; the message says which size to lower.
            NonFiniteLogitsError: the target's logits are NaN; the message says at which step.
        """
        self.check_prompts(prompts, max_new_tokens)
        check_at_least(1, {"prefill_chunk_size": prefill_chunk_size})
        num_rows = len(prompts)
        processing = Processing.none() if processing is None else processing
        max_length = max(map(len, prompts)) + max_new_tokens
        with self.running():
            device = self.target.device
            timer = PhaseTimer(device)
            seeds = row_seeds(seed if self.acceptance.samples or seed is not None else 0, num_rows)
            seeds = self.target.broadcast_from_first(seeds.to(device))
            stops = torch.tensor(stop_tokens, dtype=torch.int32, device=device) if stop_tokens else None
            captured = None
            host_reads = on_step is not None and reads_logits
            if not host_reads:
                captured = self._find_captured(
                    num_rows, max_length, processing, len(stop_tokens), timer, may_capture=max_new_tokens > 1
                )
            rows = num_rows if captured is None else captured.state.room.batch_size
            prompt = Prompt.padded(prompts, rows, max_length, device)
            chunk_size = PREFILL_CHUNK_SIZE if prefill_chunk_size is None else prefill_chunk_size
            with timer.phase("prefill"):
                if captured is None:
                    # processes that share a model must take steps of the same shapes
                    is_alone = self.captured is None and self.target.sharding is None
                    may_ask = is_alone and device.type == "cpu"
                    room = Room(rows, max_length, prompt.tokens.shape[1], max_new_tokens, may_ask=may_ask)
                    with self.explaining_lack_of_memory(num_rows, max_length):
                        state, drafter = self._new_state(room, device), self.drafter.copy_for(room, device)
                else:
                    state, drafter = captured.state, captured.generation.drafter
                generation = self._generation(state, drafter, stops, processing, timer, host_reads=host_reads)
                num_tokens = min(chunk_size, prompt.tokens.shape[1])
                advice = f"lower prefill_chunk_size (here {num_tokens} tokens of {rows} rows at a time) or the batch"
                with self.explaining_lack_of_memory(num_rows, max_length, advice):
                    output = generation.begin(prompt, max_new_tokens, seeds, prefill_chunk_size=chunk_size)
            follower = Follower(state, drafter, num_rows, on_step, reads_output=host_reads)
            if captured is None:
                while follower.take(follower.message().tolist(), output):
                    output = generation.step(self.target.agree(follower.way()))
            else:
                self._replay(captured, generation, follower, max_new_tokens - 1)
            return self._result(generation, follower, num_rows, is_captured=captured is not None, keep_cache=keep_cache)

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
            processing: one that sets something, whatever its values, or nothing, as the calls to come.

        Returns:
            Whether there is a captured step now; False where steps run eagerly.
        """
        if not 2 <= max_length <= self.target.max_positions:
            raise ValueError(f"max_length: expected 2 to {self.target.max_positions}, got {max_length}")
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        processing = Processing.none() if processing is None else processing
        with self.running():
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
        memory = self.lay_out(room, torch.device("meta"))
        plan = MemoryPlan.of(self.target, memory.drafter, memory.state)
        if self.captured is None or self.captured.cannot_capture:
            return Description(plan, (), captures=False)
        captured = tuple((one.state.room, len(one.steps)) for one in self.captured.memories())
        return Description(plan, captured, captures=True)

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
        most = self.target.max_positions - max(lengths)
        if not 1 <= max_new_tokens <= most:
            raise ValueError(
                f"max_new_tokens: expected 1 to {max(most, 0)} after a prompt of {max(lengths)} tokens "
                f"(the model's context is {self.target.max_positions}), got {max_new_tokens}"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the models as decoding needs them, wherever they have gone since the last call.

        What was captured read them where they were: it is dropped if anything was moved or replaced. Values that were
        changed in place, as by an optimizer, are read by replays too.
        """
        with torch_defaults(), self.target.locked():
            self.target.follow_model()
            if self.target.device != self._rule_device:
                self._set_up()
            with without_autograd(self.target.device), self.target.hooked():
                # here the target's weights lie as passes read them; a draft model's do once it is hooked, too
                is_bound = self._places is not None and self._places.stay()
                if not is_bound:
                    self.release()
                    self.drafter.bind(self.target)
                    self.num_bindings += 1
                with self.drafter.session(), self.scratch.active():
                    # to look everything up takes longer than to bind again: nothing for one call that captures nothing
                    if not is_bound and (self.captured is not None or self._has_run):
                        self._places = Places(self.target, self.drafter)
                    self._has_run = True
                    yield

    def lay_out(self, room: Room, device: torch.device) -> Memory:
        """Memory that stays: on the target's device, or on "meta" to learn how much it takes."""
        return Memory(self._new_state(room, device), self.drafter.copy_for(room, device))

    def _new_state(self, room: Room, device: torch.device) -> DecodeState:
        shape = self.drafter.shape
        return DecodeState.new(self.target, room, num_nodes=shape.num_nodes, max_depth=shape.max_depth, device=device)

    def _generation(
        self,
        state: DecodeState,
        drafter: Drafter,
        stops: torch.Tensor | None,
        processing: Processing,
        timer: PhaseTimer,
        *,
        host_reads: bool = False,
    ) -> Generation:
        """A generation that has not begun; `host_reads` says whether code on the host reads logits."""
        needs_logits = host_reads or self.acceptance.needs_logits or not processing.is_idle
        return Generation(self.target, drafter, self._rule, state, stops, processing, timer, needs_logits)

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
        # the rule itself is part of the key: another one at the same address would be another key
        key = (self.acceptance, signature, num_stop_tokens)
        found = captured.find(batch_size, max_length, key)
        if found is not None or not may_capture:
            return found
        try:
            with timer.phase("capture"), self.explaining_lack_of_memory(batch_size, max_length):
                memory = captured.memory(batch_size, max_length)
                if memory is None:
                    room = captured.room(batch_size, max_length)
                    memory = captured.keep(self.lay_out(room, self.target.device))
                return captured.record(memory, key, self._thrown_away(memory, processing, num_stop_tokens))
        except BaseException:
            captured.release()
            raise

    def _thrown_away(self, memory: Memory, processing: Processing, num_stop_tokens: int) -> Generation:
        """A generation that has begun on prompts of one token, for its step to be recorded."""
        device, state = self.target.device, memory.state
        stops = torch.full((num_stop_tokens,), -1, dtype=torch.int32, device=device) if num_stop_tokens else None
        silent = PhaseTimer(device, enabled=False)
        generation = self._generation(state, memory.drafter, stops, processing, silent)
        prompt = Prompt.padded([], state.room.batch_size, state.room.max_length, device)
        generation.begin(prompt, state.room.max_new_tokens, torch.zeros_like(state.uniforms.seeds))
        return generation

    @contextmanager
    def explaining_lack_of_memory(
        self, batch_size: int, max_length: int, advice: str = "lower max_new_tokens, the batch or the tree"
    ) -> Iterator[None]:
        """Say of an error that tells of too little memory what was needed and what to do."""
        try:
            yield
            return
        except (torch.OutOfMemoryError, torch.AcceleratorError) as raised:
            if not isinstance(raised, torch.OutOfMemoryError) and "out of memory" not in str(raised):
                raise
            error = raised
        plan = self.describe(batch_size=batch_size, max_length=max_length).plan
        raise type(error)(
            f"memory: expected {plan.total_bytes / 2**30:.2f} GiB on {self.target.device} beside the results of "
            f"passes, got {str(error).splitlines()[0]}; {advice}\n{plan}"
        ) from error

    def _replay(self, captured: CapturedStep, generation: Generation, follower: Follower, max_steps: int) -> None:
        """Replay a captured step for a generation that has begun on its memory."""
        assert self.captured is not None
        stops = captured.generation.stop_tokens
        if stops is not None and generation.stop_tokens is not None:
            stops.copy_(generation.stop_tokens)
        try:
            with generation.timer.phase("steps"):
                self.captured.run(captured, follower, max_steps)
        finally:
            if int(generation.state.progress[1]) >= 0:  # in a surplus replay, too
                self.captured.release()  # the cache holds NaN, which masked lanes of later calls would read

    def _result(
        self, generation: Generation, follower: Follower, num_rows: int, *, is_captured: bool, keep_cache: bool
    ) -> DecodeResult:
        """What the first `num_rows` rows emitted, rows that fill a bucket up left out."""
        state, timer = generation.state, generation.timer
        num_emitted, deepest, num_steps = state.counts(num_rows)
        stats = AcceptanceStats(
            num_emitted,
            deepest,
            lossless=self.acceptance.lossless,
            times_ms=timer.times_ms(),
            num_target_passes=num_steps,
            captured=is_captured,
            spans_ms=timer.spans_ms(),
            plan=follower.report(num_steps),
        )
        cache = None
        if keep_cache:
            cache = state.cache.copy_of(num_rows) if is_captured else state.cache
        return DecodeResult(state.tokens(num_rows), stats, cache)


def without_autograd(device: torch.device) -> AbstractContextManager[Any]:
    """No gradients; on a CPU also none of autograd's bookkeeping, a twentieth of the time of a small model's pass.

    Elsewhere it costs nothing, and libraries of quantized layers may keep tensors that they make in the first pass.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()
