"""What happens on the host after each step of `generate`: scores are kept, texts are ended, the streamer is fed.

A step may emit several tokens. Criteria see every prefix, one token at a time, so that a text ends exactly where plain
decoding would have ended it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.loop.step import StepOutput, StepReport

__all__ = ["HostSteps"]


class HostSteps:
    """The `on_step` of one call.

    Args:
        prompts: per row its 1-D prompt, without padding.
        config: says whether to keep the target's logits (`output_logits`) and the processed ones (`output_scores`) of
            every new token, and after how many seconds (`max_time`) all rows end with the step that is running.
        criteria: transformers' `StoppingCriteria`s, called with the ids of one row, [1, t].
        streamer: gets each step's new tokens; for one row.
    """

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        config: GenerationConfig,
        *,
        criteria: Sequence[Any] = (),
        streamer: Any | None = None,
    ) -> None:
        self._texts = [prompt.cpu() for prompt in prompts]
        self._criteria = criteria
        self._deadline = None if config.max_time is None else time.monotonic() + config.max_time
        self._streamer = streamer
        self._logits: list[list[torch.Tensor]] | None = [[] for _ in prompts] if config.output_logits else None
        self._scores: list[list[torch.Tensor]] | None = [[] for _ in prompts] if config.output_scores else None
        self._reads_logits = self._logits is not None or self._scores is not None
        has_code = bool(criteria) or self._deadline is not None or streamer is not None
        self._is_needed = has_code or self._reads_logits

    def arguments(self) -> dict[str, Any]:
        """As keywords of `Decoder.decode`."""
        return {"on_step": self if self._is_needed else None, "reads_logits": self._reads_logits}

    def begin(self, ids: torch.Tensor) -> None:
        """Show the streamer the prompt, [1, T]."""
        if self._streamer is not None:
            self._streamer.put(ids.cpu())

    def end(self) -> None:
        """Tell the streamer that the text is complete."""
        if self._streamer is not None:
            self._streamer.end()

    def __call__(self, report: StepReport) -> Mapping[int, int]:
        """As `specdec.loop.step.OnStep`."""
        ended: dict[int, int] = {}
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        for row, new in enumerate(report.new):
            if not new:
                continue
            if report.output is not None:
                self._keep_logits(row, report.output, len(new))
            keep = self._first_stop(row, new)
            if keep is None and is_late:
                keep = len(new)
            if keep is not None:
                ended[row] = keep
                new = new[:keep]
                for kept in (self._logits, self._scores):
                    if kept is not None:
                        del kept[row][len(kept[row]) - len(report.new[row]) + keep :]
            self._texts[row] = torch.cat((self._texts[row], torch.tensor(new)))
            if self._streamer is not None:
                self._streamer.put(torch.tensor(new))
        return ended

    def _keep_logits(self, row: int, output: StepOutput, num_new: int) -> None:
        """Keep what is asked for of the new tokens of a row."""
        nodes = output.path[row, :num_new].long()
        for kept, source in ((self._logits, output.scores), (self._scores, output.processed)):
            if kept is not None:
                kept[row].extend(source.logits[row, nodes].float().clone())

    def _first_stop(self, row: int, new: list[int]) -> int | None:
        """How many of the new tokens stay if a criterion ends the row; None if none does."""
        if not self._criteria:
            return None
        text = torch.cat((self._texts[row], torch.tensor(new)))
        start = len(self._texts[row])
        before = 0 if self._scores is None else len(self._scores[row]) - len(new)
        for count in range(1, len(new) + 1):
            scores = None
            if self._scores is not None:
                scores = tuple(score[None] for score in self._scores[row][: before + count])
            ids = text[None, : start + count]
            if any(_says_stop(criterion, ids, scores) for criterion in self._criteria):
                return count
        return None

    def scores(self, pad_token: int) -> tuple[torch.Tensor, ...] | None:
        """Processed logits as transformers returns them: per new token [B, V]. A row that has ended surely pads."""
        return _stack(self._scores, pad_token)

    def logits(self, pad_token: int) -> tuple[torch.Tensor, ...] | None:
        """The target's logits in the same form."""
        return _stack(self._logits, pad_token)


def _says_stop(criterion: Any, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> bool:
    answer = criterion(ids, scores)
    if not isinstance(answer, (bool, torch.Tensor)):
        name = type(criterion).__name__
        raise ValueError(f"stopping_criteria: expected a bool or a tensor from {name}, got {type(answer).__name__}")
    return bool(torch.as_tensor(answer).any())


def _stack(rows: list[list[torch.Tensor]] | None, pad_token: int) -> tuple[torch.Tensor, ...] | None:
    if rows is None:
        return None
    ended = torch.full_like(rows[0][0], -torch.inf)
    if 0 <= pad_token < len(ended):
        ended[pad_token] = 0.0
    longest = max(map(len, rows))
    return tuple(torch.stack([row[step] if step < len(row) else ended for row in rows]) for step in range(longest))
