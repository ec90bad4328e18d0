"""A request from the caller's side: its handle, and what comes of it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from specdec.engine.settings import RequestSettings
from specdec.loop.stats import AcceptanceStats

__all__ = ["EngineClosedError", "FinishReason", "Handle", "QueueFullError", "RequestFailedError", "RequestResult"]
__all__ += ["TokenLogprobs"]

_LOG = logging.getLogger("specdec")

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "timeout"]


class QueueFullError(RuntimeError):
    """As many requests wait as may.

    Attributes:
        retry_after: seconds after which a row is likely to be free.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(RuntimeError):
    """The engine takes no more requests."""


class RequestFailedError(RuntimeError):
    """The request failed.

    Attributes:
        is_alone: whether the others that ran go on; otherwise the model failed for all of them.
    """

    def __init__(self, message: str, *, is_alone: bool = True) -> None:
        super().__init__(message)
        self.is_alone = is_alone


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the model found an emitted token, before any setting of sampling.

    Attributes:
        token: the emitted one.
        logprob: its log-probability, nats.
        top: the most probable tokens and their log-probabilities, falling.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What came of a request.

    Attributes:
        tokens: emitted ones, a stop token and those of a stop string included.
        finish_reason: `"stop"` (a stop token or a stop string), `"length"`, `"cancelled"` or `"timeout"`.
        stop_string: the one that ended it.
        stats: of this request alone, one row; phases are not timed.
        logprobs: of every token, if they were asked for.
        queue_ms: from `submit` to the beginning of its prompt.
        first_token_ms: from `submit` to the first token; NaN without one.
        total_ms: from `submit` to the end.
    """

    tokens: list[int]
    finish_reason: FinishReason
    stop_string: str | None
    stats: AcceptanceStats
    logprobs: list[TokenLogprobs] | None
    queue_ms: float
    first_token_ms: float
    total_ms: float


@dataclass(slots=True)
class _Progress:
    """What the engine has said so far; guarded by the handle's condition."""

    tokens: list[int] = field(default_factory=list)
    num_taken: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    result: RequestResult | None = None
    error: RequestFailedError | None = None


class Handle:
    """A request that was accepted. All methods may be called from any thread.

    Iterating gives the new tokens as they come, a list of them each time, and ends with the request; what one iteration
    or `take` has given no other gives again.

    Attributes:
        id: counts the requests of an engine up from 0.
        prompt_length: tokens of the prompt.
        settings: what was asked for.
    """

    def __init__(
        self,
        number: int,
        prompt: list[int],
        settings: RequestSettings,
        on_progress: "Callable[[Handle], None] | None" = None,
    ) -> None:
        self.id = number
        self.prompt = prompt
        self.settings = settings
        self.submitted = time.monotonic()
        self.is_cancelled = False
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._progress = _Progress()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        with self._changed:
            return self._progress.result is not None or self._progress.error is not None

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
            new = self.take()
            if new:
                yield new
            elif self.is_done:
                self.result()
                return

    def take(self) -> list[int]:
        """The tokens that came since the last call; nothing waits."""
        with self._changed:
            progress = self._progress
            new = progress.tokens[progress.num_taken :]
            progress.num_taken = len(progress.tokens)
            return new

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            RequestFailedError: it failed.
        """
        with self._changed:
            progress = self._progress
            ended = self._changed.wait_for(lambda: progress.result is not None or progress.error is not None, timeout)
            if not ended:
                raise TimeoutError(f"timeout: expected the end of request {self.id} within {timeout} s")
            if progress.result is None:
                assert progress.error is not None
                raise RequestFailedError(*progress.error.args, is_alone=progress.error.is_alone)
            return progress.result

    def cancel(self) -> None:
        """End it with what it has; the engine sees it after the step that is running."""
        self.is_cancelled = True

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens so far, if they were asked for."""
        with self._changed:
            return list(self._progress.logprobs)

    def push(self, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """For the engine: more tokens came."""
        with self._changed:
            self._progress.tokens += tokens
            self._progress.logprobs += logprobs
            self._changed.notify_all()
        self._tell()

    def finish(self, result: RequestResult) -> None:
        """For the engine: it has ended."""
        with self._changed:
            self._progress.result = result
            self._changed.notify_all()
        self._tell()

    def fail(self, error: RequestFailedError) -> None:
        """For the engine: it has failed."""
        with self._changed:
            self._progress.error = error
            self._changed.notify_all()
        self._tell()

    def _has_news(self) -> bool:
        progress = self._progress
        has_tokens = len(progress.tokens) > progress.num_taken
        return has_tokens or progress.result is not None or progress.error is not None

    def _tell(self) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(self)
        except Exception:
            _LOG.exception("on_progress: of request %d failed; the request is cancelled", self.id)
            self._on_progress = None
            self.cancel()
