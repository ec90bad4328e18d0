"""A request from the engine's side: what its row has emitted, and when it ends."""

import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from specdec.engine.memory import RowReport
from specdec.engine.requests import FinishReason, Handle, RequestFailedError, RequestResult, TokenLogprobs
from specdec.engine.stops import StopSearch
from specdec.loop.stats import AcceptanceStats

__all__ = ["Task", "logprobs_of"]

NAN = float("nan")


class Task:
    """A request that waits, or runs in a row.

    Args:
        handle: the caller's side.
        tokenizer: for stop strings.
        on_end: called when it has ended, with the reason, what was accepted and the seconds since it was submitted.
    """

    def __init__(
        self,
        handle: Handle,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_end: Callable[[str, AcceptanceStats, float], None] | None = None,
    ) -> None:
        self.handle = handle
        self._on_end = on_end
        self.settings = handle.settings
        self.prompt = handle.prompt
        self.is_done = False
        self.num_output = 0
        self.num_emitted: list[int] = []
        self.deepest: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if self.settings.logprobs is None else []
        self._stops = StopSearch(self.settings.stop_tokens, self.settings.stop_strings, tokenizer, handle.prompt)
        self._tokens: list[int] = []
        self._began: float | None = None
        self._first_token: float | None = None
        timeout = self.settings.timeout
        self._deadline = None if timeout is None else handle.submitted + timeout

    @property
    def num_tokens(self) -> int:
        """Tokens of its text, as far as is known."""
        return len(self.prompt) + self.num_output

    def overdue(self) -> FinishReason | None:
        """Why it is to end now, whatever it has; None if it goes on."""
        if self.handle.is_cancelled:
            return "cancelled"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "timeout"
        return None

    def begin(self) -> None:
        """Its prompt is read."""
        self._began = time.monotonic()

    def take(self, report: RowReport, told: Sequence[TokenLogprobs] = ()) -> FinishReason | None:
        """Take in what a step left of its row.

        Args:
            report: of the row.
            told: log-probabilities of all its new tokens, if they were asked for.

        Returns:
            Why it has ended; None if it goes on.
        """
        count = report.num_output - self.num_output
        new = list(report.newest[len(report.newest) - count :])
        self.num_output = report.num_output
        kept = self._stops.first_stop(new)
        ended: FinishReason | None = "stop" if kept is not None else "length" if report.budget == 0 else None
        new = new[:kept]
        of_step = report.num_emitted - (count - len(new))  # the prompt's token is no step's
        if of_step > 0:
            self.num_emitted.append(of_step)
            self.deepest.append(report.deepest)
        if self.logprobs is not None:
            self.logprobs += told[: len(new)]
        if new:
            self._first_token = self._first_token or time.monotonic()
            self._tokens += new
            self.handle.push(new, told[: len(new)])
        return ended

    def finish(self, reason: FinishReason) -> None:
        """Tell the caller of the end."""
        self.is_done = True
        since, now = self.handle.submitted, time.monotonic()
        begin, first = (NAN if one is None else 1e3 * (one - since) for one in (self._began, self._first_token))
        stats = self._stats()
        self._tell_of_end(reason, stats)
        string = self._stops.string if reason == "stop" else None
        total = 1e3 * (now - since)
        self.handle.finish(RequestResult(self._tokens, reason, string, stats, self.logprobs, begin, first, total))

    def fail(self, error: str, *, is_alone: bool = True) -> None:
        """Tell the caller that nothing will come of it; `is_alone` as `RequestFailedError`."""
        self.is_done = True
        self._tell_of_end("failed", self._stats())
        self.handle.fail(RequestFailedError(error, is_alone=is_alone))

    def _stats(self) -> AcceptanceStats:
        return AcceptanceStats([self.num_emitted], [self.deepest], True, {}, len(self.num_emitted))

    def _tell_of_end(self, reason: str, stats: AcceptanceStats) -> None:
        if self._on_end is not None:
            self._on_end(reason, stats, time.monotonic() - self.handle.submitted)


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """How probable tokens are by the logits [n, V] that decided them."""
    if not tokens:
        return []
    logps = logits.float().log_softmax(-1)
    own = logps.gather(1, torch.tensor(tokens, device=logps.device)[:, None])[:, 0].tolist()
    values, places = logps.topk(num_top, dim=-1)
    tops = [list(zip(ids, ps, strict=True)) for ids, ps in zip(places.tolist(), values.tolist(), strict=True)]
    return [TokenLogprobs(token, logp, top) for token, logp, top in zip(tokens, own, tops, strict=True)]
