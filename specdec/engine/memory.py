"""One memory of rows: their state and the drafter's, a step over all of them, and what there is to tell after it.

The tensors of a memory stay where they are: rows come and go by being copied, and a captured step is replayed on them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from specdec.drafting.base import Room
from specdec.drafting.planning import Planner
from specdec.loop.captured import CapturedStep
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.rules import Greedy, Naive
from specdec.loop.step import Generation, StepOutput
from specdec.loop.timing import PhaseTimer
from specdec.models.common.cache import RowState, clear_row, copy_row

__all__ = ["Move", "RowMemory", "RowReport"]

_NUM_COUNTS = 5  # numbers of a row in a message before its newest tokens


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a step left of one row.

    Attributes:
        num_output: tokens it has emitted, the first one too.
        budget: tokens it may still emit; 0 once it has ended.
        has_nan: whether there was a NaN among its logits.
        num_emitted: tokens that this step emitted.
        deepest: depth of the deepest node that was proposed.
        newest: the last tokens, as many as the first one and a step may emit; with others in front of those.
    """

    num_output: int
    budget: int
    has_nan: bool
    num_emitted: int
    deepest: int
    newest: Sequence[int]


@dataclass(frozen=True, slots=True)
class Move:
    """A row that goes to another memory.

    Attributes:
        row: where it goes.
        source_row: where it was.
        num_tokens: slots of caches that hold all of it.
    """

    row: int
    source_row: int
    num_tokens: int


class RowMemory:
    """Memory for some rows, which have all ended at first.

    Args:
        decoder: running; the memory is its target's and its drafter's.
        num_rows: rows.
        max_length: most tokens of a row.
        stop_tokens: tokens that end any row.
        modes: the kinds of steps to capture, where steps are captured: False for rows that take the most probable
            tokens as they come, True for any.
    """

    def __init__(
        self, decoder: Decoder, num_rows: int, max_length: int, stop_tokens: Sequence[int], modes: Iterable[bool] = ()
    ) -> None:
        target = decoder.target
        may_ask = decoder.captured is None and target.device.type == "cpu"
        room = Room(num_rows, max_length, max_length - 1, max_length - 1, may_ask=may_ask)
        with decoder.explaining_lack_of_memory(num_rows, max_length, "lower max_rows or max_length"):
            memory = decoder.lay_out(room, target.device)
        stops = torch.tensor(stop_tokens, dtype=torch.int32, device=target.device) if stop_tokens else None
        silent = PhaseTimer(target.device, enabled=False)
        self._greedy = Generation(
            target, memory.drafter, Greedy(), memory.state, stops, Processing.none(), silent, needs_logits=False
        )
        by_rows = Processing.by_rows(target)
        self._sampled = replace(self._greedy, rule=Naive(), processing=by_rows, needs_logits=True)
        self.state, self.drafter = memory.state, memory.drafter
        self.num_rows = num_rows
        self.num_nodes = 0  # at most, of a row in the newest step
        self._no_settings = self.state.settings[0].clone()
        self._newest = torch.arange(-self.state.path_length - 1, 0, device=target.device)
        self._captured: dict[bool, CapturedStep] = {}
        for mode in modes:
            if decoder.captured is not None and not decoder.captured.cannot_capture:
                step = decoder.captured.record(memory, mode, self._sampled if mode else self._greedy)
                self._captured |= {} if step is None else {mode: step}
        for row in range(num_rows if self._captured else 0):  # what was captured has run on them
            self.clean(row)
        self.planner = Planner()

    def begin_steps(self) -> None:
        """Rows that were decoded elsewhere go on here; where prompts are read alone nothing is planned.

        The planner may be that of another memory with as many rows, which must not step any more.
        """
        self.planner = self.drafter.planner(is_moved=True)

    @property
    def modes(self) -> frozenset[bool]:
        """The kinds of steps that were captured."""
        return frozenset(self._captured)

    def generation(self, *, reads_logits: bool, tells_logits: bool = False) -> Generation:
        """What steps and prompts go through.

        Args:
            reads_logits: whether any row asks for more than its most probable tokens.
            tells_logits: whether somebody wants to know the logits.
        """
        generation = self._sampled if reads_logits else self._greedy
        return replace(generation, needs_logits=True) if tells_logits else generation

    def step(self, *, reads_logits: bool, tells_logits: bool) -> StepOutput | None:
        """One step of all rows; as for `generation`. What it computed is known where it was not replayed."""
        self.state.uniforms.step.fill_(1)  # the one place where steps are noted
        way = self.planner.choose()
        self.num_nodes = self.drafter.num_nodes_of(way)
        captured = None if tells_logits else self._captured.get(reads_logits)
        if captured is None:
            return self.generation(reads_logits=reads_logits, tells_logits=tells_logits).step(way)
        captured.recordings[way].replay()
        return None

    def message(self) -> torch.Tensor:
        """What there is to tell after a step, int32 on the device; `read` says what it means."""
        state = self.state
        newest = state.output.gather(1, (state.num_output[:, None] + self._newest).clamp_(min=0))
        columns = state.num_output, state.budget, state.nan_rows, *state.steps[1]
        rows = torch.cat((torch.stack(columns, 1), newest), 1).flatten()
        forecast = self.drafter.forecast
        return rows if forecast is None else torch.cat((rows, forecast))

    @property
    def message_size(self) -> int:
        """Numbers in a message."""
        forecast = self.drafter.forecast
        of_rows = self.num_rows * (_NUM_COUNTS + self._newest.shape[0])
        return of_rows + (0 if forecast is None else forecast.shape[0])

    def read(self, message: list[int]) -> list[RowReport]:
        """What a message says of every row; the planner is told what is for it."""
        width = _NUM_COUNTS + self._newest.shape[0]
        if self.drafter.forecast is not None:
            self.planner.observe(message[self.num_rows * width :])
        self.planner.forget()
        rows = [message[row * width : (row + 1) * width] for row in range(self.num_rows)]
        return [RowReport(row[0], row[1], bool(row[2]), row[3], row[4], row[_NUM_COUNTS:]) for row in rows]

    def parts(self) -> RowState:
        """All that belongs to single rows; between two steps."""
        self.drafter.settle()
        return *self.state.row_state, *self.drafter.row_state()

    def take_rows(self, source: "RowMemory", moves: Sequence[Move]) -> None:
        """Copy rows of another memory to rows of this one; nothing waits for the device."""
        to, of = self.parts(), source.parts()
        for move in moves:
            copy_row(to, move.row, of, move.source_row, move.num_tokens)

    def clean(self, row: int) -> None:
        """Make a row what it was at first, a row that has ended, so that nothing not finite is left of it."""
        clear_row(self.parts(), row)
        self.state.settings[row].copy_(self._no_settings)

    def end(self, row: int) -> None:
        """End a row, or make one that has ended cost less."""
        self.state.budget[row].fill_(0)
        self.state.cache.lengths[row].fill_(0)
