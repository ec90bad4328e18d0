"""The commands of a stage, in processes of their own with a limit and a log; none can take another with it."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT

from specdec.bench.campaign.stages import MINUTES, Stage
from specdec.bench.common.journal import AGAIN, LEFT
from specdec.common.files import replace_file

__all__ = ["CUT_OFF", "DONE", "Outcome", "end_leftovers", "run_stage"]

DONE, CUT_OFF = "done", "cut off"
_GRACE_S = 10.0  # between an interrupt and a kill
_TICK_S = 30.0
_MAX_LOSSES = 8  # of the device, by one command in one call
_LEFTOVERS = "processes.json"
_FINE = (0, 5)  # 5: pytest had nothing left to run


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stage.

    Attributes:
        commands: "done", "cut off" or "failed: ..." by command.
        wall_s: seconds it took.
        stopped: this process was told to end meanwhile.
    """

    commands: dict[str, str]
    wall_s: float
    stopped: bool


class _Processes:
    """The processes of a stage that are running; once stopped, none is left and none begins.

    A file tells of them, since a call that is killed cannot end them any more; the next one does (`end_leftovers`).
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self.environment = {**os.environ}
        if jobs > 1:  # or each of them takes every core for the definitions that it compares with
            self.environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
        self.lock = threading.Lock()
        self.file = folder / _LEFTOVERS
        self.running: list[subprocess.Popen[bytes]] = []
        self.is_stopped = False

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | None:
        """Start a command; None once stopped. It is in a group of its own, so that its children end with it."""
        with self.lock, log.open("a") as file:
            if self.is_stopped:
                return None
            print("$", *command, file=file, flush=True)
            process = subprocess.Popen(
                command, env=self.environment, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True
            )
            self.running.append(process)
            running = {str(other.pid): _birth(other.pid) for other in self.running if other.poll() is None}
            replace_file(self.file, json.dumps(running))
            return process

    def stop(self) -> None:
        """Kill all."""
        with self.lock:
            self.is_stopped = True
        for process in self.running:
            _stop(process, 0)


def _birth(process: int) -> str:
    """Something that tells a process from a later one of the same number; empty if there is no such process."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"
    except OSError:
        return ""


def end_leftovers(folder: Path) -> None:
    """Kill what a call that was killed itself left running, with its children."""
    file = folder / _LEFTOVERS
    found = json.loads(file.read_text()) if file.is_file() else {}
    for process, birth in found.items():
        if birth and _birth(int(process)) == birth:
            with suppress(ProcessLookupError):
                os.killpg(int(process), signal.SIGKILL)
    file.unlink(missing_ok=True)


def run_stage(
    stage: Stage, names: Sequence[str], limit_s: float, folder: Path, on_tick: Callable[[float], None]
) -> Outcome:
    """Run commands of a stage.

    Args:
        stage: the stage.
        names: its commands to run.
        limit_s: seconds for all of them; what uses them up is interrupted, and killed if that does not help.
        folder: of the logs, which are appended to.
        on_tick: called every half minute with the seconds that the stage has taken.

    Returns:
        What became of it. No exit status and no missing program raises, and neither does an interrupt.
    """
    begin = time.monotonic()
    processes = _Processes(folder, stage.jobs)

    def run(name: str) -> str:
        return _run(stage.commands[name], folder / f"{name}.log", begin + limit_s, processes)

    with ThreadPoolExecutor(stage.jobs) as pool:
        futures = {name: pool.submit(run, name) for name in names}
        try:
            while wait(futures.values(), _TICK_S).not_done:
                on_tick(time.monotonic() - begin)
        except (KeyboardInterrupt, SystemExit):
            processes.stop()
    commands = {name: future.result() for name, future in futures.items()}
    return Outcome(commands, time.monotonic() - begin, processes.is_stopped)


def _run(command: Sequence[str], log: Path, deadline: float, processes: _Processes) -> str:
    """Run one command, in a new process whenever it lost the device; returns what became of it."""
    for num_losses in range(_MAX_LOSSES):
        left = deadline - time.monotonic()
        if left <= 0:
            return CUT_OFF
        try:
            process = processes.start([part.replace(MINUTES, f"{left / 60:.2f}") for part in command], log)
        except OSError as error:
            return f"failed: could not be started: {error.strerror}"
        if process is None:
            return CUT_OFF
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            _stop(process, _GRACE_S)
            return CUT_OFF
        if processes.is_stopped or status == LEFT:
            return CUT_OFF
        if status != AGAIN:
            lost = f"lost the device {num_losses} times, then " if num_losses else ""
            return DONE if status in _FINE and not lost else f"failed: {lost}exit status {status}"
    return f"failed: lost the device {_MAX_LOSSES} times"


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Interrupt a process and its children, which lets it write what it has, then kill them."""
    for wish, patience_s in ((signal.SIGINT, grace_s), (signal.SIGKILL, None)):
        if process.poll() is None and (patience_s is None or patience_s > 0):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, wish)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
