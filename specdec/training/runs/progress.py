"""What a run shows while it goes: a bar on a terminal, plain lines on standard error otherwise.

    step 120 of 1,000: loss 2.310 (head_1 1.901, head_2 2.118), 5,210 tokens/s, 0:12:34 left
    step 200 of 1,000: held out 2.411 (head_1 1.967, head_2 2.230), tau 1.84, accepted by depth 0.64 0.29 0.16

The second form is an evaluation; on a terminal it stays above the bar. Of several processes the first one speaks.
"""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerState

__all__ = ["RunProgress"]

_LINE_EVERY_S = 10.0  # without a terminal, unless the run begins, ends or evaluates
_NO_PARTS = frozenset({"loss", "grad_norm", "learning_rate", "epoch", "step", "minutes", "tau", "runtime"})


class RunProgress(TrainerCallback):
    """Shows a run.

    Attributes:
        num_tokens: tokens learnt from since the process began, over all processes; whoever learns adds to it.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._began, self._first_step, self._minutes_before = time.monotonic(), 0, 0.0
        self._last_rate = (self._began, 0)  # time and tokens of the last rate
        self._last_line = float("-inf")

    @property
    def minutes(self) -> float:
        """What the run has taken, the parts of it before an interruption included."""
        return self._minutes_before + (time.monotonic() - self._began) / 60

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def doing(self, what: str) -> None:
        """What takes its time right now, in the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Take the time; open the bar."""
        self._began, self._first_step = time.monotonic(), state.global_step
        self._last_rate = (self._began, self.num_tokens)
        self._minutes_before = next(
            (entry["minutes"] for entry in reversed(state.log_history) if "minutes" in entry), 0
        )
        if state.is_world_process_zero and self._console.is_terminal:
            text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            columns = (TextColumn("training"), BarColumn(bar_width=20), MofNCompleteColumn(), text)
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Show losses, or an evaluation."""
        logs = kwargs["logs"]
        if not state.is_world_process_zero:
            return
        place = f"step {state.global_step:,} of {state.max_steps:,}: "
        if "eval_loss" in logs:
            self.say(place + _evaluated(logs))
        elif "loss" in logs:
            text = f"{_losses('loss', logs)}, {self._rate():,.0f} tokens/s, {self._left(state)} left"
            self.doing(text)
            now = time.monotonic()
            is_due = now - self._last_line > _LINE_EVERY_S or state.global_step == state.max_steps
            if self._bar is None and is_due:
                self._last_line = now
                self.say(place + text)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _rate(self) -> float:
        """Tokens per second since this was last asked."""
        (before, tokens), now = self._last_rate, time.monotonic()
        self._last_rate = (now, self.num_tokens)
        return (self.num_tokens - tokens) / max(now - before, 1e-9)

    def _left(self, state: TrainerState) -> timedelta:
        """Time to the end of the run, from what its steps have taken in this process."""
        done = max(state.global_step - self._first_step, 1)
        seconds = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
        return timedelta(seconds=round(seconds))


def _evaluated(logs: Mapping[str, float]) -> str:
    """An evaluation: the held-out loss, and tau with the acceptance by depth where they were measured."""
    values = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    text = _losses("held out", values)
    if "tau" in values:
        rates = [value for name, value in values.items() if name.startswith("acceptance_")]
        text += f", tau {values['tau']:.2f}"
        if rates:
            text += ", accepted by depth " + " ".join(f"{rate:.2f}" for rate in rates)
    return text


def _losses(name: str, values: Mapping[str, float]) -> str:
    """The loss, and its parts in brackets."""
    parts = [
        f"{part} {value:.3f}"
        for part, value in values.items()
        if part not in _NO_PARTS and not part.startswith("acceptance_") and not part.endswith("_per_second")
    ]
    return f"{name} {values['loss']:.3f}" + (f" ({', '.join(parts)})" if parts else "")
