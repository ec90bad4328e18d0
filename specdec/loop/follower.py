"""The host's side of a generation: what it knows of it, and how code of the caller's ends rows.

    message()        on the device: what there is to tell after a step; a copy of it goes to the host
    take(message)    on the host: tells the caller's code, ends the rows that it ends; whether any row still runs

    way()            on the host: how the next step is gone through, from what the messages before it told

The eager loop takes the message of a step before it runs the next one. The captured loop has sent further replays by
then: what they do to a row that has ended in the meantime is taken back, so that both loops give the same.
"""

import torch

from specdec.drafting.base import Drafter
from specdec.drafting.planning import PlanReport
from specdec.loop.state import DecodeState
from specdec.loop.step import NonFiniteLogitsError, OnStep, StepOutput, StepReport

__all__ = ["Follower"]


class Follower:
    """Follows one generation from its prompt on.

    Args:
        state: of the generation.
        drafter: of the generation.
        num_rows: rows that somebody asked for, the first ones of the state's.
        on_step: code of the caller's.
        reads_output: whether it reads what a step computed beside the new tokens.
    """

    def __init__(
        self,
        state: DecodeState,
        drafter: Drafter,
        num_rows: int,
        on_step: OnStep | None = None,
        *,
        reads_output: bool = False,
    ) -> None:
        self._state = state
        self._planner = drafter.planner()
        self._forecast = drafter.forecast
        self._on_step = on_step
        self._reads_output = reads_output
        self._num_steps = -1  # whose messages were taken; the prompt's is that of step 0
        self._num_output = [0] * num_rows
        self._ended: set[int] = set()  # by `on_step`
        self._newest = torch.arange(-state.path_length, 0, device=state.output.device)

    @property
    def message_size(self) -> int:
        """Numbers in a message."""
        rows = 0 if self._on_step is None else len(self._num_output) * (2 + self._newest.shape[0])
        return 2 + rows + (0 if self._forecast is None else self._forecast.shape[0])

    def way(self) -> int:
        """How to go through the next step."""
        return self._planner.choose()

    def report(self, num_steps: int) -> PlanReport | None:
        """What was chosen in so many steps; None where there was no choice."""
        num_rows = len(self._num_output)
        return self._planner.report(self._state.steps[1 : num_steps + 1, 0, :num_rows].sum(1).tolist())

    def message(self) -> torch.Tensor:
        """What there is to tell after a step, on the device; nothing waits for it.

        Returns:
            int32, `progress`; what the drafter foresees, where it knows several ways; and if there is code of the
            caller's, of all rows the tokens emitted, the budgets and the newest tokens, each of the last `width` places
            one.
        """
        state, num_rows = self._state, len(self._num_output)
        parts = [state.progress] if self._forecast is None else [state.progress, self._forecast]
        if self._on_step is not None:
            num_output = state.num_output[:num_rows]
            newest = state.output[:num_rows].gather(1, (num_output[:, None] + self._newest).clamp_(min=0))
            parts += [num_output, state.budget[:num_rows], newest.flatten()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take(self, message: list[int], output: StepOutput | None = None) -> bool:
        """Take in the next message.

        Args:
            message: what `message` gave after the next step; the first one after the prompt.
            output: what that step computed, where the caller's code reads it.

        Returns:
            Whether any row still runs.

        Raises:
            NonFiniteLogitsError: there was NaN among the logits of a running row.
        """
        (is_running, first_nan_step), rows = message[:2], message[2:]
        if first_nan_step >= 0:
            where = "while the prompt was run (step 0)" if first_nan_step == 0 else f"at step {first_nan_step}"
            raise NonFiniteLogitsError(f"model: expected finite logits, got NaN {where}")
        self._num_steps += 1
        if self._forecast is not None:
            forecast, rows = rows[: self._forecast.shape[0]], rows[self._forecast.shape[0] :]
            if self._num_steps > 0:  # the prompt's pass chose nothing
                self._planner.observe(forecast)
        if self._on_step is None:
            return bool(is_running)
        num_rows, width = len(self._num_output), self._newest.shape[0]
        num_output, budgets, newest = rows[:num_rows], rows[num_rows : 2 * num_rows], rows[2 * num_rows :]
        new: list[list[int]] = []
        for row, (count, before) in enumerate(zip(num_output, self._num_output, strict=True)):
            end = (row + 1) * width
            new.append([] if row in self._ended else newest[end - (count - before) : end])
        with torch.inference_mode(False), torch.no_grad():  # the caller's code is none of ours
            kept = self._on_step(StepReport(new, output if self._reads_output else None)) or {}
        for row, count in kept.items():
            self._state.cut(row, self._num_output[row] + count, self._num_steps)
        self._ended.update(kept)
        self._num_output = num_output
        if any(budget > 0 and row not in self._ended for row, budget in enumerate(budgets)):
            return True
        self._state.uniforms.step.fill_(self._num_steps + 1)  # further ones were surplus
        return False
