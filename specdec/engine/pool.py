"""Rows that requests come into and leave: one step after the other over all of them, prompts in between.

    pool.refill(tasks)    prompts of these are read next, in a memory of their own
    pool.advance()        a chunk of these prompts, then a step of the rows that run

When their prompts were read, rows are copied to where others have left. A memory for more or fewer rows takes the place
of the one that runs as requests come and go. Where steps are captured the host hears of a step while the next one runs.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec.engine.memory import Move, RowMemory, RowReport
from specdec.engine.refill import Refill, together
from specdec.engine.requests import TokenLogprobs
from specdec.engine.tasks import Task, logprobs_of
from specdec.loop.captured import LAG, batch_bucket
from specdec.loop.decoder import Decoder
from specdec.loop.graphs import Reader
from specdec.loop.step import StepOutput

__all__ = ["Counts", "RowPool", "describe"]

MOST_TOGETHER = 8
"""Prompts that are read side by side."""

_SETTLED = 16
"""Steps after a change of memory before fewer rows are worth another one."""

_LOG = logging.getLogger("specdec")


@dataclass(slots=True)
class Counts:
    """What the pool has done so far.

    Attributes:
        num_steps: of all memories.
        num_row_steps: steps of rows that ran.
        num_nodes: nodes that were scored in these.
        num_new_tokens: tokens that were emitted, those of prompts too.
        num_prompt_tokens: tokens of prompts that were read.
    """

    num_steps: int = 0
    num_row_steps: int = 0
    num_nodes: int = 0
    num_new_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class _Running:
    """The memory that runs, and who is in its rows."""

    memory: RowMemory
    rows: list[Task | None]
    first_logits: dict[int, torch.Tensor] = field(default_factory=dict)
    num_steps: int = 0
    num_nodes: int = 0  # of a row in the newest step
    reader: Reader | None = None
    sent: "deque[list[Task | None]]" = field(default_factory=deque)  # who was in the rows of messages under way

    def tasks(self) -> list[tuple[int, Task]]:
        """Rows that run."""
        return [(row, task) for row, task in enumerate(self.rows) if task is not None]


class RowPool:
    """Rows of one decoder, for one thread.

    Args:
        decoder: of greedy acceptance.
        max_rows: most rows that run at a time.
        max_length: most tokens of a row.
        prefill_tokens: prompt tokens that are read between two steps at most.
        stop_tokens: tokens that end any row.
    """

    def __init__(
        self, decoder: Decoder, *, max_rows: int, max_length: int, prefill_tokens: int, stop_tokens: Sequence[int]
    ) -> None:
        self.max_rows = max_rows
        self.counts = Counts()
        self._decoder = decoder
        self._max_length = max_length
        self._prefill_tokens = prefill_tokens
        self._stop_tokens = tuple(stop_tokens)
        self._binding = -1
        self._drop()

    def _drop(self) -> None:
        self._memories: dict[int, RowMemory] = {}  # those that were left, where steps were captured on them
        self._staging: dict[int, RowMemory] = {}
        self._running: _Running | None = None
        self._refill: Refill | None = None
        self._again: list[Task] = []  # whose prompts are to be read once more

    def open(self) -> None:
        """The decoder runs; memory of an earlier time serves again, unless weights have moved since."""
        if self._binding != self._decoder.num_bindings:
            self._drop()
            self._binding = self._decoder.num_bindings

    @property
    def tasks(self) -> list[Task]:
        """Those whose prompts are read, and those in rows."""
        running, refill = self._running, self._refill  # other threads ask too
        in_rows = [] if running is None else [task for _, task in running.tasks()]
        return [*in_rows, *self._again, *([] if refill is None else refill.tasks)]

    @property
    def num_rows(self) -> int:
        """Rows of the memory that runs."""
        return 0 if self._running is None else self._running.memory.num_rows

    def take_from(self, waiting: "deque[Task]") -> None:
        """Begin to read prompts of tasks that wait, as many as there will be rows for."""
        if self._refill is not None or not (waiting or self._again):
            return
        waiting.extendleft(reversed(self._again))
        self._again = []
        most = min(self.max_rows - len(self.tasks), MOST_TOGETHER)
        count = together(list(waiting)[: max(most, 0)], most) if most > 0 else 0
        if not count:
            return
        tasks = [waiting.popleft() for _ in range(count)]
        size = 1 << (count - 1).bit_length()
        try:
            if size not in self._staging:
                self._staging[size] = RowMemory(self._decoder, size, self._max_length, self._stop_tokens)
            self._refill = Refill(self._staging[size], tasks, self._prefill_tokens)
        except Exception:
            self._again = tasks
            raise
        self.counts.num_prompt_tokens += sum(len(task.prompt) for task in tasks)

    def advance(self, *, is_waiting: bool = False) -> None:
        """Read the next prompt tokens, then step all rows; `is_waiting` says whether more tasks wait for rows."""
        if self._refill is not None and self._refill.advance():
            refill, self._refill = self._refill, None
            self._move_in(refill)
        if self._running is None:
            return
        for row, task in self._running.tasks():
            reason = task.overdue()
            if reason is not None:
                task.finish(reason)
                self._leave(self._running, row)
        if self._running.tasks():
            self._step(self._running)
        if not self._running.tasks():
            self._drain(self._running)
        elif not is_waiting and self._refill is None and self._running.num_steps >= _SETTLED:
            num_rows = self._bucket(len(self._running.tasks()))
            if num_rows < self._running.memory.num_rows:
                self._change(num_rows)

    def fail(self, error: str) -> int:
        """Tell all whose requests are here that something broke, and how many they are; drops the memory."""
        tasks = [task for task in self.tasks if not task.is_done]
        self._drop()
        for task in tasks:
            task.fail(error, is_alone=False)
        return len(tasks)

    @property
    def _captures(self) -> bool:
        captured = self._decoder.captured
        return captured is not None and not captured.cannot_capture

    def _bucket(self, num_rows: int) -> int:
        """Rows of a memory for so many: few sizes where each is captured by itself."""
        size = 1 << (num_rows - 1).bit_length() if self._captures else batch_bucket(num_rows)
        return min(size, self.max_rows)

    def _move_in(self, refill: Refill) -> None:
        """Copy rows whose prompts were read to where they run."""
        num_running = 0 if self._running is None else len(self._running.tasks())
        if self._running is None or self._running.memory.num_rows < num_running + len(refill.tasks):
            self._change(self._bucket(num_running + len(refill.tasks)))
        running = self._running
        assert running is not None
        free = (row for row, task in enumerate(running.rows) if task is None)
        moves = []
        for source_row, task in enumerate(refill.tasks):
            row = next(free)
            running.rows[row] = task
            moves.append(self._move(row, source_row, task))
            logits = refill.first_logits(source_row)
            if task.settings.logprobs is not None and logits is not None:
                running.first_logits[row] = logits
        running.memory.take_rows(refill.memory, moves)

    def _move(self, row: int, source_row: int, task: Task) -> Move:
        # of steps under way the host knows no tokens yet
        beyond = (LAG + 2) * (self._decoder.drafter.shape.max_depth + 1) + 2
        return Move(row, source_row, task.num_tokens + beyond)

    def _change(self, num_rows: int, modes: frozenset[bool] = frozenset()) -> None:
        """Let the rows go on in a memory of so many."""
        before = self._running
        if before is not None:
            self._drain(before)
        modes |= {False} if before is None else before.memory.modes
        memory = self._memories.pop(num_rows, None)
        if memory is None or not (memory.modes >= modes or not self._captures):
            memory = RowMemory(self._decoder, num_rows, self._max_length, self._stop_tokens, modes)
        memory.begin_steps()
        rows: list[Task | None] = [None] * num_rows
        running = _Running(memory, rows)
        if before is not None:
            moves = []
            for row, (source_row, task) in enumerate(before.tasks()):
                rows[row] = task
                moves.append(self._move(row, source_row, task))
                if source_row in before.first_logits:
                    running.first_logits[row] = before.first_logits[source_row]
            for row in range(len(moves), num_rows):
                memory.end(row)
            memory.take_rows(before.memory, moves)
            if before.memory.modes and before.memory.num_rows != num_rows:
                self._memories[before.memory.num_rows] = before.memory
        self._running = running

    def _step(self, running: _Running) -> None:
        """One step of all rows; where steps are captured, what the step before has left is heard of."""
        settings = [task.settings for _, task in running.tasks()]
        reads_logits = any(one.reads_logits for one in settings)
        tells_logits = any(one.logprobs is not None for one in settings)
        if self._captures and not tells_logits and reads_logits not in running.memory.modes:
            self._change(running.memory.num_rows, frozenset({reads_logits}))
            assert self._running is not None
            running = self._running
        memory = running.memory
        running.num_steps += 1
        self.counts.num_steps += 1
        if tells_logits or not memory.modes:
            self._drain(running)
            if memory.state.room.may_ask and not bool(memory.state.budget.any()):
                output = None  # all have ended with their first tokens
                memory.state.steps[1].zero_()
            else:
                output = memory.step(reads_logits=reads_logits, tells_logits=tells_logits)
                running.num_nodes = 0 if output is None or output.tree is None else output.tree.tokens.shape[1]
            self._hear(running, memory.read(memory.message().tolist()), list(running.rows), output)
            return
        memory.step(reads_logits=reads_logits, tells_logits=False)
        running.num_nodes = memory.num_nodes
        if running.reader is None:
            assert self._decoder.captured is not None
            running.reader = self._decoder.captured.graphs.reader(LAG + 1, memory.message_size)
        running.reader.push(memory.message())
        running.sent.append(list(running.rows))
        if len(running.sent) > LAG:
            self._hear(running, memory.read(running.reader.pop()), running.sent.popleft())

    def _drain(self, running: _Running) -> None:
        """Hear of all steps."""
        while running.sent:
            assert running.reader is not None
            self._hear(running, running.memory.read(running.reader.pop()), running.sent.popleft())

    def _hear(
        self,
        running: _Running,
        reports: list[RowReport],
        rows: Sequence[Task | None],
        output: StepOutput | None = None,
    ) -> None:
        """Tell the tasks that were in the rows what a step has left of them, and let those go that have ended."""
        for row, (task, report) in enumerate(zip(rows, reports, strict=True)):
            if task is None or task.is_done:
                continue
            if report.has_nan:
                task.fail("model: expected finite logits, got NaN; other requests go on")
                self._clean(running, row)
                continue
            count = report.num_output - task.num_output
            self.counts.num_nodes += running.num_nodes if report.num_emitted else 0
            told: list[TokenLogprobs] = []
            if task.logprobs is not None:
                told = self._told(running, row, report, count, task, output)
            self.counts.num_new_tokens += count
            self.counts.num_row_steps += report.num_emitted > 0
            reason = task.take(report, told)
            if reason is not None:
                task.finish(reason)
                self._leave(running, row)

    def _clean(self, running: _Running, row: int) -> None:
        """Free a row whose memory holds NaN, which masked lanes of later steps would read, in kernels on a GPU."""
        running.memory.clean(row)
        running.rows[row] = None
        # it came from where other prompts may be read now
        self._staging.clear()
        if self._refill is not None:
            self._again, self._refill = [*self._refill.tasks], None

    def _told(
        self, running: _Running, row: int, report: RowReport, count: int, task: Task, output: StepOutput | None
    ) -> list[TokenLogprobs]:
        """Log-probabilities of a row's new tokens."""
        logits = []
        first = running.first_logits.pop(row, None)
        if first is not None:
            logits.append(first[None])
        if output is not None and report.num_emitted:
            nodes = output.path[row, : report.num_emitted].long()
            logits.append(output.scores.logits[row, nodes])
        tokens = list(report.newest[len(report.newest) - count :])
        return logprobs_of(torch.cat(logits), tokens, task.settings.logprobs or 0) if tokens else []

    def _leave(self, running: _Running, row: int) -> None:
        """Free a row."""
        running.rows[row] = None
        running.first_logits.pop(row, None)
        running.memory.end(row)


def describe(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
