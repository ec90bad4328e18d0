"""`specdec.Engine`: many requests on one model, in rows that are refilled as they end.

    with Engine(model, "eagle") as engine:
        handles = [engine.submit(prompt, max_new_tokens=200) for prompt in prompts]
        texts = [handle.result().tokens for handle in handles]

A thread of the engine's runs the model as long as there is work. What a request emits does not depend on the others:
greedily what plain decoding emits, sampled what `generate(..., seed=seed, acceptance="naive")` does.
"""

import atexit
import logging
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.common.defaults import torch_defaults
from specdec.drafters.union.union import Union
from specdec.drafting.base import Drafter
from specdec.engine.pool import RowPool, describe
from specdec.engine.requests import EngineClosedError, Handle, QueueFullError
from specdec.engine.settings import check_prompt, read_request
from specdec.engine.tasks import Task
from specdec.kernels.common.launch import Backend
from specdec.loop.decoder import Decoder
from specdec.loop.graphs import Graphs
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target
from specdec.trees.dynamic import AnyTreeLike
from specdec.tuning.auto import AUTO, AnySource, load_drafter
from specdec.tuning.union import measured, names_of

__all__ = ["Engine", "EngineStats"]

DEFAULT_MAX_LENGTH = 4096
"""Tokens of a request, prompt and new ones, where nobody says and the model's context is longer."""

_KEPT_STATS = 256  # requests that ended last, whose acceptance is reported
_LOG = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does and has done.

    Attributes:
        num_running: requests in rows, or whose prompts are read.
        num_waiting: requests that wait.
        max_rows: most that may run.
        num_rows: rows of the memory that runs.
        num_finished: requests that have ended, by reason; `"failed"` too.
        num_prompt_tokens: tokens of prompts that were read.
        num_new_tokens: tokens that were emitted.
        num_steps: steps, each of all rows.
        tau: tokens per step and row of the last 256 requests that have ended; NaN without.
        acceptance_at_depth: of the same, as `AcceptanceStats`.
        mean_nodes: nodes that the target scored per row and step; NaN without a step.
    """

    num_running: int
    num_waiting: int
    max_rows: int
    num_rows: int
    num_finished: dict[str, int]
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    tau: float
    acceptance_at_depth: list[float]
    mean_nodes: float


class Engine:
    """Decodes requests as they come, several side by side. All methods may be called from any thread.

    While requests run the model belongs to the engine: other calls of this library that use it wait, and other code
    must not run it.

    Args:
        model: the target: a decoder-only transformers model, not sharded over processes.
        drafter: as for `specdec.load_drafter`; None for plain decoding.
        tokenizer: needed for `stop_strings`.
        tree: as for `specdec.load_drafter`. With `"auto"` every step's tree is cut to what pays with the rows that
            run, by costs that are measured for some seconds now; a drafter whose tree cannot be cut keeps its own.
        max_rows: most requests that run side by side.
        max_length: most tokens of a request, prompt and new ones, which the memory of every row has room for; by
            default the model's context, and at most 4096.
        max_queue: most requests that wait.
        prefill_tokens: prompt tokens that are read between two steps at most: how long running rows wait for others.
        stop_tokens: tokens that end every text; by default the model's own. Requests may name more.
        backend: what runs the kernels; by default decided by the device.
        capture: as for `Decoder`.

    Raises:
        TypeError, ValueError, NotImplementedError: a model or a drafter that cannot be used, or a bad number.

    Attributes:
        target: the hooked model.
        drafter: what drafts.
        tokenizer: the tokenizer.
        max_rows: most rows.
        max_length: most tokens of a request.
        max_queue: most requests that wait.
    """

    @torch_defaults()
    def __init__(
        self,
        model: PreTrainedModel | Target,
        drafter: AnySource = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tree: AnyTreeLike | None = AUTO,
        max_rows: int = 16,
        max_length: int | None = None,
        max_queue: int = 1024,
        prefill_tokens: int = 512,
        stop_tokens: Sequence[int] | None = None,
        backend: Backend | None = None,
        capture: bool | Graphs = True,
    ) -> None:
        sizes = {"max_rows": max_rows, "max_queue": max_queue, "prefill_tokens": prefill_tokens}
        check_at_least(1, sizes)
        self.target = model if isinstance(model, Target) else Target(model, backend=backend)
        if self.target.sharding is not None:
            raise NotImplementedError("model: expected one that is whole in this process, got one sharded over several")
        most = self.target.max_positions
        self.max_length = min(most, DEFAULT_MAX_LENGTH) if max_length is None else max_length
        if not 2 <= self.max_length <= most:
            raise ValueError(f"max_length: expected 2 to {most}, the model's context, got {max_length}")
        self.drafter = _load(drafter, self.target, tree, max_rows)
        self.tokenizer = tokenizer
        self.max_rows, self.max_queue = max_rows, max_queue
        self._stop_tokens = frozenset(self.target.stop_tokens if stop_tokens is None else stop_tokens)
        self._decoder = Decoder(self.target, self.drafter, backend=backend, capture=capture)
        self._pool = RowPool(
            self._decoder,
            max_rows=max_rows,
            max_length=self.max_length,
            prefill_tokens=prefill_tokens,
            stop_tokens=sorted(self._stop_tokens),
        )
        self._waiting: deque[Task] = deque()
        self._ended: deque[AcceptanceStats] = deque(maxlen=_KEPT_STATS)
        self._seconds: deque[float] = deque(maxlen=_KEPT_STATS)
        self._num_finished: Counter[str] = Counter()
        self._num_submitted = 0
        self._is_closing = False
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()
        atexit.register(_close, weakref.ref(self))

    def submit(
        self,
        prompt: Sequence[int] | torch.Tensor,
        *,
        seed: int | None = None,
        timeout: float | None = None,
        logprobs: int | None = None,
        on_progress: Callable[[Handle], None] | None = None,
        generation_config: GenerationConfig | None = None,
        **settings: Any,
    ) -> Handle:
        """Ask for a text.

        Args:
            prompt: token ids.
            seed: of sampling; a random one by default.
            timeout: seconds from now after which the request ends with what it has.
            logprobs: how many alternatives of every token to tell, 0 to 20, with the log-probabilities that the model
                gives them; None for none. Steps are not replayed while such a request runs.
            on_progress: called with the handle, by the engine's thread, when tokens came and at the end; it must return
                at once.
            generation_config: as for `specdec.generate`.
            settings: fields of `GenerationConfig`: `max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`,
                `min_p`, `repetition_penalty`, `eos_token_id`, `stop_strings`.

        Raises:
            TypeError, ValueError: a bad prompt or setting, or more tokens than fit.
            NotImplementedError: a setting that requests cannot have.
            QueueFullError: `max_queue` requests wait already.
            EngineClosedError: the engine was closed.
        """
        ids = check_prompt(prompt, self.target.vocab_size, self.max_length)
        asked = read_request(
            self.target,
            len(ids),
            self.max_length,
            settings,
            generation_config=generation_config,
            seed=seed,
            timeout=timeout,
            logprobs=logprobs,
        )
        missing = sorted(self._stop_tokens - asked.stop_tokens)
        if missing:
            raise ValueError(
                f"eos_token_id: expected {sorted(self._stop_tokens)}, which end every text here, among them, "
                f"got {sorted(asked.stop_tokens)}; an engine with stop_tokens=() takes any"
            )
        if asked.stop_strings and self.tokenizer is None:
            raise ValueError(f"tokenizer: expected one with stop_strings {list(asked.stop_strings)}, got None")
        with self._changed:
            if self._is_closing:
                raise EngineClosedError("engine: expected an open one, got one that was closed")
            if len(self._waiting) >= self.max_queue:
                raise QueueFullError(
                    f"max_queue: expected at most {self.max_queue} requests that wait, got one more", self._wait()
                )
            handle = Handle(self._num_submitted, ids, asked, on_progress)
            self._num_submitted += 1
            self._waiting.append(Task(handle, self.tokenizer, self._note))
            self._changed.notify_all()
        return handle

    @property
    def is_closed(self) -> bool:
        """Whether no more requests are taken."""
        return self._is_closing

    def stats(self) -> EngineStats:
        """What it does and has done."""
        with self._changed:
            ended, waiting = list(self._ended), len(self._waiting)
            finished = dict(self._num_finished)
        counts, running = self._pool.counts, sum(not task.is_done for task in self._pool.tasks)
        merged = AcceptanceStats.merged(ended)
        return EngineStats(
            num_running=running,
            num_waiting=waiting,
            max_rows=self.max_rows,
            num_rows=self._pool.num_rows,
            num_finished=finished,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_new_tokens=counts.num_new_tokens,
            num_steps=counts.num_steps,
            tau=merged.tau,
            acceptance_at_depth=merged.acceptance_at_depth,
            mean_nodes=counts.num_nodes / counts.num_row_steps if counts.num_row_steps else math.nan,
        )

    def close(self, *, finish: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and wait until the others have ended. Further calls do nothing but wait.

        Args:
            finish: whether requests that were accepted go on to their ends; otherwise they are cancelled.
            timeout: seconds after which those that have not ended are cancelled; None for as long as it takes.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if finish:
            self._thread.join(timeout)
        if self._thread.is_alive():
            self._is_over = True  # the thread sees it after the step that is running
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    def _run(self) -> None:
        """The engine's thread."""
        while self._await_work():
            try:
                with torch_defaults(), self._decoder.running():
                    self._pool.open()
                    while self._has_work():
                        self._end_overdue()
                        with self._changed:
                            self._pool.take_from(self._waiting)
                        self._pool.advance(is_waiting=bool(self._waiting))
            except Exception as error:
                _LOG.exception("engine: requests that were running have failed")
                self._fail(describe(error))

    def _fail(self, error: str) -> None:
        """Tell those whose requests ran that something broke; if none ran, the first that waits."""
        if self._pool.fail(error):
            return
        with self._changed:
            first = self._waiting.popleft() if self._waiting else None
        if first is not None:
            first.fail(error, is_alone=False)

    def _await_work(self) -> bool:
        """Wait for something to do; False once it was closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._has_work()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._pool.tasks)

    def _end_overdue(self) -> None:
        """End requests that wait and need not wait any longer; when all is over, all of them."""
        if self._is_over:
            for task in (*self._waiting, *self._pool.tasks):
                task.handle.cancel()
        with self._changed:
            waiting = list(self._waiting)
            overdue = [(task, reason) for task in waiting if (reason := task.overdue())]
            for task, _ in overdue:
                self._waiting.remove(task)
        for task, reason in overdue:
            task.finish(reason)

    def _note(self, reason: str, stats: AcceptanceStats, seconds: float) -> None:
        """Count a request that has ended."""
        with self._changed:
            self._num_finished[reason] += 1
            self._ended.append(stats)
            self._seconds.append(seconds)

    def _wait(self) -> float:
        """Seconds until a row is likely to be free for one more request."""
        if not self._seconds:
            return 1.0
        mean = sum(self._seconds) / len(self._seconds)
        return max(1.0, mean * len(self._waiting) / self.max_rows)


def _load(source: AnySource, target: Target, tree: AnyTreeLike | None, max_rows: int) -> Drafter:
    """The drafter, one whose tree can be cut in a union of its own."""
    if tree != AUTO:
        return load_drafter(source, target, tree=tree)
    drafter = load_drafter(source, target)
    if isinstance(drafter, Union):
        return drafter if drafter.costs is None else measured(target, drafter, batch_size=max_rows)
    if drafter.shape.num_nodes == 1 or drafter.reads_rejected or drafter.num_ways > 1:
        return drafter
    return measured(target, Union([drafter], names=names_of([source])), batch_size=max_rows)


def _close(engine: "weakref.ref[Engine]") -> None:
    """At the end of the process: the thread must not run the model while the interpreter goes away."""
    found = engine()
    if found is not None:
        found.close(finish=False)
