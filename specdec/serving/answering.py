"""One request of a client: its answers, each a request of the engine, told as they come or all at once."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.common.randomness import row_seeds
from specdec.engine.engine import Engine
from specdec.engine.requests import (
    EngineClosedError,
    Handle,
    QueueFullError,
    RequestFailedError,
    RequestResult,
    TokenLogprobs,
)
from specdec.serving.forms import Form, Piece
from specdec.serving.protocol import ApiError, GenerationRequest
from specdec.serving.texts import VisibleText

__all__ = ["Answers", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took.

    Attributes:
        num_prompt: tokens of the prompts, each counted once.
        num_new: tokens that were emitted.
        num_accepted: those of them that were drafted.
        num_proposed: nodes on the deepest paths that were drafted.
    """

    num_prompt: int
    num_new: int
    num_accepted: int
    num_proposed: int

    def record(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_new,
            "total_tokens": self.num_prompt + self.num_new,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.num_accepted,
                "rejected_prediction_tokens": self.num_proposed - self.num_accepted,
            },
        }


class _Answer:
    """One of the answers: what is told of it, piece by piece."""

    def __init__(self, index: int, text: VisibleText) -> None:
        self.index = index
        self.handle: Handle | None = None
        self.result: RequestResult | None = None
        self._text = text
        self._num_told = 0

    @property
    def reason(self) -> str | None:
        """Why it has ended: OpenAI's words, and `"cancelled"` or `"timeout"` where it has none."""
        return None if self.result is None else self.result.finish_reason

    def news(self) -> tuple[str, list[TokenLogprobs]] | None:
        """What there is to tell now, None if nothing; sets `result` at the end."""
        handle = self.handle
        assert handle is not None
        is_done = handle.is_done  # asked before: what comes later is told later
        tokens = handle.take()
        piece = self._text.add(tokens)
        logprobs = handle.logprobs[self._num_told :] if handle.settings.logprobs is not None else []
        self._num_told += len(logprobs)
        if is_done:
            self.result = handle.result(0)
            piece += self._text.rest()
        if not (piece or logprobs or is_done):
            return None
        return piece, logprobs


class Answers:
    """All answers to a request of a client.

    Args:
        engine: decodes.
        request: what was asked.
        prompts: token ids of each prompt.
        form: of the endpoint.
        max_new_tokens: most tokens of an answer where the client does not say.

    Raises:
        ApiError: what the engine refuses.
    """

    def __init__(
        self, engine: Engine, request: GenerationRequest, prompts: Sequence[list[int]], form: Form, max_new_tokens: int
    ) -> None:
        assert engine.tokenizer is not None
        self._engine, self._request, self._form = engine, request, form
        self._tokenizer = engine.tokenizer
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._id = f"{form.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_prompt = sum(map(len, prompts))
        self._answers: list[_Answer] = []
        n = request.n or 1
        seeds: Sequence[int | None] = [None] * (n * len(prompts))
        if request.seed is not None:
            seeds = [one % 2**64 for one in row_seeds(request.seed, n * len(prompts)).tolist()]
        rows = [prompt for prompt in prompts for _ in range(n)]
        try:
            for index, (prompt, seed) in enumerate(zip(rows, seeds, strict=True)):
                answer = _Answer(index, VisibleText(self._tokenizer, prompt, request.stops))
                answer.handle = self._submit(prompt, seed, max_new_tokens)
                self._answers.append(answer)
        except BaseException:
            self.cancel()
            raise

    def _submit(self, prompt: list[int], seed: int | None, max_new_tokens: int) -> Handle:
        request, engine = self._request, self._engine
        room = engine.max_length - len(prompt)
        asked = {"top_p": request.top_p, "min_p": request.min_p, "repetition_penalty": request.repetition_penalty}
        settings: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        temperature = 1.0 if request.temperature is None else request.temperature
        if temperature == 0:
            settings = {"repetition_penalty": request.repetition_penalty} if request.repetition_penalty else {}
        else:
            settings |= {"temperature": temperature, "top_k": request.top_k or 0}
            settings.setdefault("top_p", 1.0)
        try:
            return engine.submit(
                prompt,
                max_new_tokens=min(max_new_tokens, max(room, 1)) if request.limit is None else request.limit,
                do_sample=temperature > 0,
                stop_strings=request.stops or None,
                seed=seed,
                logprobs=request.num_logprobs,
                on_progress=self._on_progress,
                **settings,
            )
        except QueueFullError as error:
            wait = {"Retry-After": str(round(error.retry_after + 0.5))}
            raise ApiError(429, str(error), code="queue_full", headers=wait) from None
        except EngineClosedError:
            raise ApiError(503, "the server is shutting down", code="shutting_down") from None
        except NotImplementedError as error:
            raise ApiError(400, str(error), code="unsupported") from None
        except (TypeError, ValueError) as error:
            name = str(error).partition(":")[0]
            is_long = name in ("prompt", "max_new_tokens")
            param = {"max_new_tokens": "max_tokens"}.get(name, name)
            raise ApiError(
                400, str(error), param=param, code="context_length_exceeded" if is_long else "invalid_value"
            ) from None

    def _on_progress(self, _: Handle) -> None:
        """Wake the event loop, from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop has ended
            self.cancel()

    @property
    def handles(self) -> list[Handle]:
        """Of all answers."""
        return [answer.handle for answer in self._answers if answer.handle is not None]

    def cancel(self) -> None:
        """Nobody reads the answers any more."""
        for handle in self.handles:
            handle.cancel()

    def usage(self) -> Usage:
        """Of the answers that have ended."""
        results = [answer.result for answer in self._answers if answer.result is not None]
        emitted = list(itertools.chain(*(one.stats.num_emitted[0] for one in results)))
        deepest = itertools.chain(*(one.stats.deepest[0] for one in results))
        accepted = sum(emitted) - len(emitted)
        proposed = sum(max(depth, count - 1) for depth, count in zip(deepest, emitted, strict=True))
        return Usage(self._num_prompt, sum(len(one.tokens) for one in results), accepted, proposed)

    async def whole(self) -> dict[str, Any]:
        """All answers at once.

        Raises:
            ApiError: 500, one of them failed.
        """
        texts = [""] * len(self._answers)
        told: list[list[TokenLogprobs]] = [[] for _ in self._answers]
        async for answer, piece, logprobs in self._pieces():
            texts[answer.index] += piece
            told[answer.index] += logprobs
        choices = [
            self._form.choice(
                Piece(answer.index, text, logprobs if self._tells else None, finish_reason=answer.reason),
                self._tokenizer,
            )
            for answer, text, logprobs in zip(self._answers, texts, told, strict=True)
        ]
        return self._head(self._form.name) | {"choices": choices, "usage": self.usage().record()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answers as they come, usage behind them if it is asked for; what fails ends the stream as an error."""
        options = self._request.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head(self._form.chunk_name) | ({"usage": None} if with_usage else {})
        offsets = [0] * len(self._answers)
        begun: set[int] = set()
        try:
            async for answer, text, logprobs in self._pieces():
                index, told = answer.index, logprobs if self._tells else None
                piece = Piece(index, text, told, offsets[index], index not in begun, answer.reason)
                offsets[index] += len(text)
                begun.add(index)
                yield head | {"choices": [self._form.delta(piece, self._tokenizer)]}
        except ApiError as error:
            yield error.body
            return
        if with_usage:
            yield head | {"choices": [], "usage": self.usage().record()}

    @property
    def _tells(self) -> bool:
        return self._request.num_logprobs is not None

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._request.model}

    async def _pieces(self) -> AsyncIterator[tuple[_Answer, str, list[TokenLogprobs]]]:
        """What there is to tell, of all answers, until all have ended."""
        open_ = list(self._answers)
        while open_:
            await self._news.wait()
            self._news.clear()
            for answer, news in self._all_news(open_):
                yield answer, *news
            open_ = [answer for answer in open_ if answer.result is None]

    def _all_news(self, answers: Sequence[_Answer]) -> Iterator[tuple[_Answer, tuple[str, list[TokenLogprobs]]]]:
        for answer in answers:
            try:
                news = answer.news()
            except RequestFailedError as error:
                self.cancel()
                raise ApiError(500, str(error), code="request_failed") from None
            if news is not None:
                yield answer, news
