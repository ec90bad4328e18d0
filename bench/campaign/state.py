"""What earlier calls of the campaign did, and what is next.

The state is written before and after everything that runs, so that a call which was killed is seen by the next one.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdec.bench.campaign.running import CUT_OFF, DONE
from specdec.bench.campaign.stages import Stage
from specdec.common.files import replace_file

__all__ = ["KILLED", "State", "next_stage", "open_commands"]

RUNNING, KILLED = "running", "killed"
_MAX_FAILURES = 2


@dataclass
class State:
    """What was done so far.

    Attributes:
        calls: of every call its "device", "utc", "minutes" and "end": RUNNING, KILLED, or how it ended.
        commands: of every command that was begun what became of it.
        failures: how often it failed.
        used_s: seconds by stage, over all calls.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "State":
        """Read a state; a call that was running was killed, and its commands cut off."""
        if not path.is_file():
            return cls()
        state = cls(**json.loads(path.read_text(encoding="utf-8")))
        if state.calls and state.calls[-1]["end"] == RUNNING:
            state.calls[-1]["end"] = KILLED
        state.commands = {name: CUT_OFF if end == RUNNING else end for name, end in state.commands.items()}
        return state

    def write(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        replace_file(path, json.dumps(asdict(self), indent=1))

    def note(self, commands: dict[str, str]) -> None:
        """Note what became of commands."""
        self.commands.update(commands)
        for name, end in commands.items():
            if end.startswith("failed"):
                self.failures[name] = self.failures.get(name, 0) + 1

    def forget(self, stages: Iterable[Stage]) -> None:
        """Forget what was done in stages."""
        for stage in stages:
            self.used_s.pop(stage.name, None)
            for name in stage.commands:
                self.commands.pop(name, None)
                self.failures.pop(name, None)


def open_commands(stage: Stage, state: State, *, retries: bool = True) -> list[str]:
    """The commands of a stage that are not done: never begun or cut off, and with `retries` those that failed once."""
    if stage.unavailable is not None:
        return []

    def is_open(name: str) -> bool:
        end = state.commands.get(name, CUT_OFF)
        return end in (CUT_OFF, RUNNING) or (retries and end != DONE and state.failures.get(name, 0) < _MAX_FAILURES)

    return [name for name in stage.commands if is_open(name)]


def next_stage(
    stages: Sequence[Stage], state: State, left_s: float, is_allowed: Callable[[str], bool]
) -> tuple[Stage, list[str], float] | None:
    """What to run in the time that is left, if anything fits.

    First whatever was not begun or was cut off, in order, each stage within what is left of its own time; then what
    used up its own time or failed once.

    Args:
        stages: the most telling first.
        state: what was done so far.
        left_s: seconds left of this call.
        is_allowed: whether a command may still run in this call.

    Returns:
        The stage, its commands to run, and its limit in seconds.
    """
    for retries in (False, True):
        for stage in stages:
            names = [name for name in open_commands(stage, state, retries=retries) if is_allowed(name)]
            own_s = left_s if retries else stage.most_s - state.used_s.get(stage.name, 0.0)
            limit_s = min(own_s, left_s)
            if names and limit_s >= stage.least_s:
                return stage, names, limit_s
    return None
