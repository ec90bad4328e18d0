"""Stages of a long measurement: commands with time limits, run one after another in processes of their own.

The stages are listed with the most telling first. A stage that fails, hangs or is cut off stops no other; when time is
short, the last ones are dropped first.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Outcome", "Stage", "plan", "run_stage", "run_stages"]

_GRACE_S = 15.0
_OK = frozenset({0, 5})  # 5: pytest found no test to run
_TAIL_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a measurement.

    Attributes:
        name: what `--only` and reports call it.
        commands: command lines by name; a log each.
        least_s: the stage is not started with less time than that, in seconds.
        most_s: the stage gets no more time than that, in seconds.
        jobs: commands that run at the same time; 1 if anything is timed.
        environment: variables to set; an empty value removes one.
        unavailable: why it cannot run on this machine, or None.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    least_s: float
    most_s: float
    jobs: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stage.

    Attributes:
        stage: its name.
        status: "done", "failed", "cut off" (by its limit), "no time" or "unavailable".
        commands: "done", "failed: exit status N", "cut off" or "no time" for every command that was due.
        limit_s: time it was given, in seconds.
        wall_s: time it took, in seconds.
        detail: why it did not run, or the end of the first log that tells of a failure.
    """

    stage: str
    status: str
    commands: Mapping[str, str]
    limit_s: float
    wall_s: float
    detail: str


def plan(stages: Sequence[Stage], seconds: float) -> dict[str, float]:
    """Choose what to run in the time that is left.

    Args:
        stages: the most telling first.
        seconds: time that is left.

    Returns:
        The stages to keep, by name in order, with the time limit of each if it ran now: its least time and what the
        least times of the others leave over, up to its most. A stage whose least time does not fit beside those
        before it is dropped; a shorter one after it may still be kept.
    """
    kept: list[Stage] = []
    for stage in stages:
        if stage.least_s <= seconds:
            kept.append(stage)
            seconds -= stage.least_s
    return {stage.name: min(stage.most_s, stage.least_s + seconds) for stage in kept}


def run_stages(stages: Sequence[Stage], seconds: float, folder: Path) -> Iterator[Outcome]:
    """Run stages one after another, planned anew before each, since a stage may leave some of its time.

    Args:
        stages: the most telling first.
        seconds: time for all of them.
        folder: working folder of the logs; a log is named after its command.

    Yields:
        The outcome of every stage, also of those that were not run.
    """
    deadline = time.monotonic() + seconds
    pending = list(stages)
    while pending:
        stage, left = pending[0], deadline - time.monotonic()
        limit_s = plan(pending, left).get(stage.name)
        pending.pop(0)
        if stage.unavailable is not None:
            yield Outcome(stage.name, "unavailable", {}, 0, 0, stage.unavailable)
        elif limit_s is None:
            yield Outcome(stage.name, "no time", {}, 0, 0, f"{left:.0f} s left, {stage.least_s:.0f} s needed")
        else:
            yield run_stage(stage, limit_s, folder)


def run_stage(stage: Stage, limit_s: float, folder: Path) -> Outcome:
    """Run the commands of a stage.

    Args:
        stage: what to run.
        limit_s: time for all its commands, in seconds; then they are interrupted, and killed if that does not help.
        folder: where the logs go.

    Returns:
        What became of it. No exit status and no missing program raises.
    """
    start = time.monotonic()
    environment = {**os.environ, **stage.environment}
    environment = {name: value for name, value in environment.items() if value or name not in stage.environment}
    running: list[subprocess.Popen[bytes]] = []

    def run(name: str) -> str:
        left = start + limit_s - time.monotonic()
        return _run(stage.commands[name], folder / f"{name}.log", left, environment, running)

    with ThreadPoolExecutor(stage.jobs) as pool:
        try:
            commands = dict(zip(stage.commands, pool.map(run, stage.commands), strict=True))
        except BaseException:  # this process is being stopped
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                _kill(process)
            raise
    failed = [name for name, status in commands.items() if status.startswith("failed")]
    unfinished = set(commands.values()) & {"cut off", "no time"}
    return Outcome(
        stage=stage.name,
        status="failed" if failed else "cut off" if unfinished else "done",
        commands=commands,
        limit_s=round(limit_s, 1),
        wall_s=round(time.monotonic() - start, 1),
        detail=(folder / f"{failed[0]}.log").read_text(errors="replace")[-_TAIL_CHARACTERS:] if failed else "",
    )


def _run(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    running: list[subprocess.Popen[bytes]],
) -> str:
    """Run one command with its output in a log; returns what became of it."""
    if limit_s <= 0:
        return "no time"
    with log.open("w") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a group of its own, so that its children can be stopped with it
            )
        except OSError as error:
            file.write(f"{error}\n")
            return "failed: could not be started"
        running.append(process)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return "cut off"
    return "done" if status in _OK else f"failed: exit status {status}"


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to stop, which lets pytest write what it has, then kill it."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
