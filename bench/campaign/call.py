"""One call of the campaign: it goes on where the last one ended, and leaves an archive whatever happens to it."""

import json
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from specdec.bench.campaign.results import WORK, collect, newest, pack, unpack
from specdec.bench.campaign.running import Outcome, end_leftovers, run_stage
from specdec.bench.campaign.stages import Stage, stages
from specdec.bench.campaign.state import RUNNING, State, next_stage
from specdec.bench.campaign.summary import Counts, summarize
from specdec.common.files import replace_file
from specdec.common.provenance import provenance

__all__ = ["DRY_NOTE", "Call"]

DRY_NOTE = "dry run on a CPU: nothing was timed on a GPU"
_RESERVE_S = 20.0  # to stop the last stage and to write the archive
_MAX_BEGINNINGS = 2  # of a command in a call: within the time of its stage, and once more in what is left


class Call:
    """One call.

    Attributes:
        output: folder of everything that is kept between calls.
        archives: folder that receives the archives.
        stages: all of them, in order.
        state: what was done so far.
    """

    def __init__(self, output: Path, archives: Path, *, on_cpu: bool, counts: Counts) -> None:
        """Read what earlier calls left, and write the archive of one that was killed.

        Args:
            output: where they left it; if there is nothing, the newest archive is laid out there.
            archives: where the archives go, and where theirs are, or else in `output`.
            on_cpu: tiny sizes on the CPU.
            counts: what was counted of a step, which the summary puts beside its time.
        """
        self.output, self.archives, self._counts = output, archives, counts
        self._folder, self._state_file = output / WORK, output / "state.json"
        self._about = {**provenance(), **({"dry": DRY_NOTE} if on_cpu else {})}
        archive = newest(archives) or newest(output)
        if not self._state_file.is_file() and archive is not None:
            unpack(archive, output)
        self._folder.mkdir(parents=True, exist_ok=True)
        end_leftovers(self._folder)
        self.stages = stages(self._folder, on_cpu=on_cpu)
        was_open = self._state_file.is_file() and RUNNING in self._state_file.read_text(encoding="utf-8")
        self.state = State.read(self._state_file)
        self._begun: Counter[str] = Counter()
        if was_open:
            self._save()

    def forget(self, names: Collection[str]) -> None:
        """Forget what earlier calls found in these stages; their archives have it."""
        chosen = [stage for stage in self.stages if stage.name in names]
        for stage in chosen:
            for name in stage.commands:
                for file in self._folder.glob(f"{name}.*"):
                    file.unlink()
        self.state.forget(chosen)

    def run(self, names: Collection[str], seconds: float) -> int:
        """Run what is due among these stages.

        Args:
            names: of the stages.
            seconds: time for all of them, what it takes to end included.

        Returns:
            The exit status: 1 if a command failed or the call was told to stop.
        """
        deadline = time.monotonic() + seconds - min(_RESERVE_S, seconds / 5)
        keys = ("device", "git_sha", "utc")
        call = {**{key: self._about[key] for key in keys}, "minutes": round(seconds / 60, 2), "end": RUNNING}
        if self.state.calls and self.state.calls[-1]["device"] != call["device"]:
            self.forget(["machine"])
        self.state.calls.append(call)
        self._save()
        chosen = [stage for stage in self.stages if stage.name in names]
        has_failed = is_stopped = False
        while not is_stopped:
            found = next_stage(chosen, self.state, deadline - time.monotonic(), self._may_run)
            if found is None:
                break
            outcome = self._run_stage(*found)
            is_stopped = outcome.stopped
            has_failed |= any(end.startswith("failed") for end in outcome.commands.values())
        call["end"] = "stopped" if is_stopped else "done"
        self._save()
        return int(has_failed or is_stopped)

    def _may_run(self, name: str) -> bool:
        """Whether a command may run in this call, again or for the first time."""
        is_new = self._begun[name] == 0
        return is_new or (self._begun[name] < _MAX_BEGINNINGS and not self.state.commands[name].startswith("failed"))

    def _run_stage(self, stage: Stage, names: list[str], limit_s: float) -> Outcome:
        """Run commands of a stage; the state tells of them before, meanwhile and after."""
        used_s = self.state.used_s.get(stage.name, 0.0)

        def tick(seconds: float) -> None:
            self.state.used_s[stage.name] = used_s + seconds
            self._save()

        self._begun.update(names)
        self.state.note(dict.fromkeys(names, RUNNING))
        tick(0.0)
        outcome = run_stage(stage, names, limit_s, self._folder, tick)
        self.state.note(outcome.commands)
        tick(outcome.wall_s)
        for end in sorted({*outcome.commands.values()}):
            commands = [name for name, found in outcome.commands.items() if found == end]
            print(f"{stage.name}: {end}, {outcome.wall_s:.0f} s: {', '.join(commands)}", flush=True)
        return outcome

    def _save(self) -> None:
        """Write the state, the records, the summary, and the archive of them all."""
        self.state.write(self._state_file)
        dry = {key: self._about[key] for key in ("dry",) if key in self._about}
        records = [{**record, **dry} for record in collect(self.stages, self._folder)]
        page = summarize(self.stages, self.state, records, self._about, self._folder, self._counts)
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        replace_file(self.output / "records.jsonl", lines)
        replace_file(self.output / "summary.md", page)
        pack(self.output, self.archives / f"{len(self.state.calls)}.tar.gz")
