"""Which drafters propose in the next step, and how large the tree may be: what is worth most tokens per second.

After every step the device tells how many tokens each set of the drafters that had proposed was expected to get with
each number of nodes, by calibrated reach (`reach.py`). The planner keeps a running mean of these and divides it by what
such a step costs. Drafters are right together and wrong together, so that reach promises too much of some sets and too
little of others: it is held against the tokens that came. A drafter that is left out tells nothing, so it is asked
again: the longer it was not worth it, the more rarely, but never so rarely that it could not come back, and the more
often the less it costs. Where steps end before the next one begins, they are timed, and the table of costs is corrected
by what they took; so that it stays right of plain decoding, that is done now and then, too. Nothing else here looks at
a clock or at the device, so that it can be simulated.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.drafters.union.costs import WayCosts
from specdec.drafting.planning import PlannedStep, Planner, PlanReport

__all__ = ["FIXED_POINT", "NUM_COUNTS", "PLAIN", "Choices", "Way", "WayPlanner", "ladder"]

FIXED_POINT = 1024
"""Expected tokens come from the device as integers, multiples of 1 / FIXED_POINT."""

NUM_COUNTS = 3
"""Numbers of a step before its gains: rows that run, the most tokens that one emits, draft tokens that all accept."""

PLAIN = 0
"""The set of no drafters, and the number of the way that is plain decoding."""

SIZES = (1, 4, 12, 32, 64, 128, 256)
"""Nodes of trees of which each is captured by itself; and the budget. With the root alone drafters are only asked."""

_LADDER = (*range(1, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384)
_SMOOTHING = 0.2  # weight of the newest step in a running mean
_MOST_MOVED = 1.5  # by which a single step may differ from what steps took before
_SLOWEST = 0.05  # weight of the newest step in what sets of drafters take, one beside the other
_LONG_AGO = 1000  # steps: of what was never seen
_FORGET = 0.97  # of what was expected and what came, with every step
_SURE = 4.0  # draft tokens that count as if they had come as expected
_ALL = -1  # all sets of drafters together
_FIRST_WAIT = 4  # steps before a drafter that was left out is asked again
_MOST_WAIT = 64
_SHARE = 0.01  # of the time of plain decoding that asking again may take, per drafter, and timing it again


def ladder(budget: int) -> tuple[int, ...]:
    """Numbers of nodes, root included, that trees are weighed at."""
    return (*(size for size in _LADDER if size < budget), budget)


@dataclass(frozen=True, slots=True)
class Way:
    """One way through a step.

    Attributes:
        group: the drafters that propose, as bits.
        num_nodes: most nodes of the tree, root included.
        parts: the sets of drafters, as bits, that this step tells something about; the group itself is the first.
    """

    group: int
    num_nodes: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """All ways, and what each costs.

    Attributes:
        names: of the drafters.
        budget: nodes of the largest tree, root included.
        costs: of a step; None where nothing was measured: all drafters then propose in every step.
        most_emitted: tokens that a step emits per row at most.
        ways: plain decoding first.
        sizes: numbers of nodes that trees are weighed at.
    """

    names: tuple[str, ...]
    budget: int
    costs: WayCosts | None
    most_emitted: int
    ways: tuple[Way, ...] = field(init=False)
    sizes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        everyone = (1 << len(self.names)) - 1
        singles = [1 << number for number in range(len(self.names))]
        groups = singles if len(singles) == 1 else [*singles, everyone]
        sizes = [size for size in SIZES if size < self.budget] + [self.budget]
        if self.costs is None:
            groups, sizes = [everyone], [self.budget]
        ways = [Way(PLAIN, 1, ())]
        for group in groups:
            parts = (group, *(part for part in groups if part & group == part and part != group))
            ways += [Way(group, size, parts) for size in sizes]
        object.__setattr__(self, "ways", tuple(ways))
        object.__setattr__(self, "sizes", ladder(self.budget))

    @property
    def num_parts(self) -> int:
        """Most sets of drafters that a way tells about."""
        return max(len(way.parts) for way in self.ways)


class WayPlanner(Planner):
    """Chooses among the ways of a union of drafters.

    Args:
        choices: what there is.
        batch_size: rows that are decoded together, padding included.
        backlog: most tokens that may wait for a drafter which does not draft.
        may_ask: whether trees are cut in the step itself to the size that is worth most: then only the largest trees
            are chosen among.
        clock: seconds, where the time from one choice to what is observed of it is that of a step.
    """

    def __init__(
        self,
        choices: Choices,
        batch_size: int,
        *,
        backlog: int,
        may_ask: bool,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.choices = choices
        self._backlog = backlog
        self._clock = clock
        self._began = 0.0
        self._pace = 1.0  # of all steps, over the table of costs
        self._corrections: dict[int, float] = {}  # of each set over that
        self._timed: dict[int, int] = {}  # by set, the step that was timed last
        self._came: dict[int, tuple[float, float]] = {}  # draft tokens that were expected of a set, and that came
        self._may_ask = may_ask
        largest = [way for way in choices.ways if way.group == PLAIN or way.num_nodes == choices.budget]
        self._allowed = largest if may_ask else list(choices.ways)
        self._gains: dict[tuple[int, int], float] = {}  # draft tokens expected, by set and size
        self._spent: dict[int, float] = {}  # where trees are cut in the step: its expected time, by set
        self._step = 0  # of all generations
        self._seen: dict[int, int] = {}  # by set, the step that last told something about it
        groups, rows = {way.group for way in choices.ways}, batch_size
        sizes = {way.num_nodes for way in choices.ways} | {*choices.sizes}
        costs = choices.costs
        self._costs = {} if costs is None else {(g, n): costs.of(g, n, rows) for g in groups for n in sizes}
        self._names = {
            group: tuple(name for number, name in enumerate(choices.names) if group >> number & 1) for group in groups
        }
        self._waits = [_FIRST_WAIT] * len(choices.names)
        self._num_rows = batch_size
        self._idle = [0] * len(self.choices.names)  # steps since each drafter drafted
        self.begin()

    def begin(self, finish: Callable[[], Sequence[int]] = list, *, is_moved: bool = False) -> None:
        """Begin a generation: what was learnt about sets and sizes stays, and drafters are asked again sooner.

        Args:
            finish: called at its end; gives per drafter the accepted tokens that it had proposed.
            is_moved: whether rows come from elsewhere, with tokens that wait for drafters: all of them draft first.
        """
        self._finish = finish
        self._waits = [max(_FIRST_WAIT, wait // 2) for wait in self._waits]
        waiting = self._backlog if is_moved else 0
        self._unread = [waiting] * len(self.choices.names)  # tokens that may wait for each
        self._pending: deque[tuple[int, int | None]] = deque()  # way and size of steps not heard of yet
        self._asked: set[int] = set()  # drafters that are asked again
        self._steps: list[PlannedStep] = []

    def choose(self) -> int:
        """As `Planner`. The very first step asks all drafters."""
        choices = self.choices
        everyone = (1 << len(choices.names)) - 1
        best = max(self._allowed, key=lambda way: (self._rate(way), -way.num_nodes))
        due = [number for number in range(len(choices.names)) if not best.group >> number & 1 and self._is_due(number)]
        if not self._gains or choices.costs is None:
            best = self._best_of(everyone)
        elif due:
            self._asked.update(due)
            wanted = best.group | sum(1 << number for number in due)
            groups = {way.group for way in self._allowed if way.group & wanted == wanted}
            best = self._best_of(min(groups, key=int.bit_count))
        elif self._is_plain_due(best):
            best = choices.ways[PLAIN]
        return self._go(best)

    def cut(self, gains: Sequence[float]) -> int:
        """How many nodes of the tree that was just drafted to score; for steps that may be cut.

        Args:
            gains: draft tokens expected of all rows together, by size of the ladder.
        """
        number, _ = self._pending[-1]
        way = self.choices.ways[number]
        size = self._best_size(way.group, gains)
        self._pending[-1] = number, size
        return size

    def observe(self, numbers: Sequence[float]) -> None:
        """As `Planner`: `NUM_COUNTS` counts, then per part of the way the gains by size.

        Of plain decoding, which tells nothing, any numbers.
        """
        if not self._pending:
            return  # of a replay that was surplus
        number, cut_to = self._pending.popleft()
        way, sizes = self.choices.ways[number], self.choices.sizes
        if self._clock is not None and self._costs:
            self._correct(way.group, cut_to or way.num_nodes, 1e3 * (self._clock() - self._began))
        self._num_rows, longest = (int(numbers[0]), int(numbers[1])) if way.group else (self._num_rows, 1)
        for member in range(len(self._unread)):
            self._unread[member] += longest - self.choices.most_emitted
        expected = 0.0
        for place, part in enumerate(way.parts):
            begin = NUM_COUNTS + place * len(sizes)
            gains = [value / FIXED_POINT for value in numbers[begin : begin + len(sizes)]]
            self._learn(part, gains)
            if place == 0:
                expected = gains[sizes.index(cut_to or way.num_nodes)]
        self._note(way, cut_to or way.num_nodes, expected * self._share_that_came(way.group))
        if way.group:
            self._compare(way.group, expected, numbers[2])
            self._judge(way)

    def forget(self) -> None:
        """As `Planner`."""
        self._steps.clear()

    def report(self, emitted: Sequence[int]) -> PlanReport | None:
        """As `Planner`."""
        count = min(len(emitted), len(self._steps))
        steps = tuple(self._steps[:count])
        return PlanReport(self.choices.names, steps, tuple(emitted[:count]), tuple(self._finish()))

    def _go(self, way: Way) -> int:
        """Count what the step does to the drafters; returns the way's number."""
        for member in range(len(self._idle)):
            drafts = way.group >> member & 1
            self._idle[member] = 0 if drafts else self._idle[member] + 1
            # until the step is heard of it may have emitted this many
            self._unread[member] = (0 if drafts else self._unread[member]) + self.choices.most_emitted
        number = self.choices.ways.index(way)
        self._pending.append((number, None))
        self._step += 1
        if self._clock is not None:
            self._began = self._clock()
        return number

    def _is_due(self, number: int) -> bool:
        is_full = self._unread[number] + self.choices.most_emitted > self._backlog
        return is_full or self._idle[number] >= self._waits[number]

    def _is_plain_due(self, best: Way) -> bool:
        """Whether plain decoding is to be timed again: the less it is behind, the more often."""
        if self._clock is None or not self._costs or not best.group:
            return False
        behind = self._rate(best) / self._rate(self.choices.ways[PLAIN]) - 1
        return self._step - self._timed.get(PLAIN, 0) >= max(_FIRST_WAIT, behind / _SHARE)

    def _learn(self, part: int, gains: Sequence[float]) -> None:
        """Take what one step told about a set of drafters into the running means."""
        since = max(self._step - self._seen.get(part, -_LONG_AGO), 1)
        weight = 1 - (1 - _SMOOTHING) ** since
        self._seen[part] = self._step
        if self._may_ask and self._costs:
            size = self._best_size(part, gains)
            spent = self._costs[part, size]
            gains = [gains[self.choices.sizes.index(size)]]
            self._spent[part] = (
                spent if part not in self._spent else self._spent[part] + weight * (spent - self._spent[part])
            )
        sizes = self.choices.sizes if not self._may_ask else self.choices.sizes[-1:]
        for size, gain in zip(sizes, gains, strict=False):
            before = self._gains.get((part, size), gain)
            self._gains[part, size] = before + weight * (gain - before)

    def _compare(self, group: int, expected: float, came: float) -> None:
        """Hold the draft tokens that were expected of a set of drafters against those that came."""
        of_all = self._ratio(_ALL)
        for one, number in ((group, of_all * expected), (_ALL, expected)):
            before = self._came.get(one, (0.0, 0.0))
            self._came[one] = _FORGET * before[0] + number, _FORGET * before[1] + came

    def _ratio(self, group: int) -> float:
        """Draft tokens that came for each that was expected, of late."""
        expected, came = self._came.get(group, (0.0, 0.0))
        return (came + _SURE) / (expected + _SURE)

    def _share_that_came(self, group: int) -> float:
        """What to expect for each draft token that reach promises: that of all sets tells about each of them."""
        return self._ratio(_ALL) * self._ratio(group)

    def _correct(self, group: int, num_nodes: int, took_ms: float) -> None:
        """Correct the costs by what a step took; one that was disturbed moves them a little.

        Texts grow and machines slow down for all sets of drafters, so that a step of one tells about the others.
        """
        excess = took_ms / self._time(group, num_nodes)
        excess = min(max(excess, 1 / _MOST_MOVED), _MOST_MOVED)
        since = self._step - self._timed.get(group, -_LONG_AGO)
        moved = 1 + (1 - (1 - _SLOWEST) ** since) * (excess - 1)
        self._corrections[group] = moved * self._corrections.get(group, 1.0)
        self._timed[group] = self._step
        self._pace *= 1 + _SMOOTHING * (excess / moved - 1)

    def _correction(self, group: int) -> float:
        """What a step of a set takes over what it was measured to take."""
        return self._pace * self._corrections.get(group, 1.0)

    def _time(self, group: int, num_nodes: int) -> float:
        """Milliseconds of a step, as corrected; 0 where nothing was measured."""
        return self._correction(group) * self._costs.get((group, num_nodes), 0.0)

    def _judge(self, way: Way) -> None:
        """Ask drafters again sooner that turned out to be worth it, and later those that did not."""
        best = max(self._allowed, key=lambda one: (self._rate(one), -one.num_nodes))
        for number in [one for one in self._asked if way.group >> one & 1]:
            self._asked.discard(number)
            is_worth_it = best.group >> number & 1
            longer = min(2 * self._waits[number], self._most_wait(number))
            self._waits[number] = _FIRST_WAIT if is_worth_it else longer

    def _rate(self, way: Way) -> float:
        """Expected tokens of all running rows per millisecond."""
        rows = self._num_rows
        if not self._costs:
            return float(way.num_nodes)  # the largest tree
        if not way.group:
            return rows / self._time(PLAIN, 1)
        gain = self._gains.get((way.group, way.num_nodes))
        if gain is None:
            return 0.0  # the first step tells something about every set
        # where trees are cut in the step, what was scored is known, and not how large the tree might have been
        spent = self._spent[way.group] if self._may_ask else self._costs[way.group, way.num_nodes]
        return (rows + gain * self._share_that_came(way.group)) / (self._correction(way.group) * spent)

    def _best_size(self, group: int, gains: Sequence[float]) -> int:
        """The size of the ladder, or the root alone, that is worth most; `gains` by size."""
        sizes, rows, costs = self.choices.sizes, self._num_rows, self._costs
        if not costs:
            return sizes[-1]
        share = self._share_that_came(group)
        rates = [(rows + gain * share) / costs[group, size] for size, gain in zip(sizes, gains, strict=True)]
        return sizes[rates.index(max(rates))]  # of equal ones the smallest

    def _best_of(self, group: int) -> Way:
        """The best size for a set of drafters; as long as nothing is known they are only asked."""
        return max(
            (way for way in self._allowed if way.group == group), key=lambda way: (self._rate(way), -way.num_nodes)
        )

    def _most_wait(self, number: int) -> int:
        """Steps after which a drafter is asked again in any case: the fewer, the less that costs."""
        if not self._costs:
            return _MOST_WAIT
        plain = self._time(PLAIN, 1)
        extra = self._time(1 << number, 1) - plain
        return max(_FIRST_WAIT, min(_MOST_WAIT, round(extra / (_SHARE * plain))))

    def _note(self, way: Way, num_nodes: int, expected: float) -> None:
        predicted = self._num_rows + expected
        costs = self._time(way.group, num_nodes), self._time(PLAIN, 1)
        self._steps.append(PlannedStep(self._names[way.group], num_nodes, self._num_rows, predicted, *costs))
