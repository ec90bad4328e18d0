"""The endpoint: routes, and what becomes of errors."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specdec.engine.engine import Engine
from specdec.engine.requests import RequestFailedError
from specdec.serving.answering import Answers
from specdec.serving.forms import ChatForm, CompletionForm, Form
from specdec.serving.limits import Limits, Rates, check_key, read_body
from specdec.serving.metrics import Metrics
from specdec.serving.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, read
from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.samples import UnusableError

__all__ = ["KEY_VARIABLE", "create_app"]

KEY_VARIABLE = "SPECDEC_API_KEY"
"""The environment variable that has the key which clients must send."""

_LOG = logging.getLogger("specdec")


def create_app(
    engine: Engine,
    *,
    name: str = "specdec",
    chat_template: str | None = None,
    limits: Limits | None = None,
    key: str | None = None,
) -> Starlette:
    """An ASGI application that answers from an engine.

    Args:
        engine: with a tokenizer.
        name: of the model, by which clients ask for it.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        limits: what is taken from clients.
        key: what clients must send; by default what `SPECDEC_API_KEY` holds, and none where it is not set.

    Raises:
        ValueError: an engine without a tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("engine: expected one with a tokenizer, got None")
    endpoint = _Endpoint(engine, name, chat_template, limits or Limits(), key or os.environ.get(KEY_VARIABLE) or None)
    routes = [
        Route("/v1/completions", endpoint.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
        Route("/v1/models", endpoint.models),
        Route("/v1/models/{model:path}", endpoint.models),
        Route("/health", endpoint.health),
        Route("/metrics", endpoint.metrics),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _own_error})


class _Endpoint:
    """What the routes share."""

    def __init__(self, engine: Engine, name: str, chat_template: str | None, limits: Limits, key: str | None) -> None:
        assert engine.tokenizer is not None
        self._engine, self._name, self._limits, self._key = engine, name, limits, key
        self._tokenizer = engine.tokenizer
        self._template = ChatTemplate(self._tokenizer, chat_template)
        self._rates = Rates(limits.requests_per_minute)
        self._metrics = Metrics(engine)
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""

        def prompts(asked: GenerationRequest) -> list[list[int]]:
            assert isinstance(asked, CompletionRequest)
            return [self._tokens(one) for one in asked.prompts]

        return await self._answer("completions", request, CompletionRequest, prompts, CompletionForm())

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""

        def prompts(asked: GenerationRequest) -> list[list[int]]:
            assert isinstance(asked, ChatRequest)
            try:
                return [self._template.prompt([message.plain() for message in asked.messages])]
            except UnusableError as error:
                raise ApiError(400, f"messages: {error.detail}", param="messages", code="invalid_value") from None
            except ValueError as error:
                raise ApiError(400, str(error), param="messages", code="no_chat_template") from None

        return await self._answer("chat", request, ChatRequest, prompts, ChatForm())

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, and one of them by name."""
        try:
            check_key(request, self._key)
            own = {"id": self._name, "object": "model", "created": self._started, "owned_by": "specdec"}
            own |= {"max_model_len": self._engine.max_length}
            asked = request.path_params.get("model")
            if asked is None:
                return JSONResponse({"object": "list", "data": [own]})
            self._check_model(asked)
            return JSONResponse(own)
        except ApiError as error:
            return _written(error)

    async def health(self, _: Request) -> Response:
        """`GET /health`: 200 while requests are taken."""
        if self._engine.is_closed:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(
        self,
        endpoint: str,
        request: Request,
        kind: type[GenerationRequest],
        prompts: Callable[[GenerationRequest], list[list[int]]],
        form: Form,
    ) -> Response:
        """Answer a request for texts."""
        response: Response | None = None
        try:
            check_key(request, self._key)
            self._rates.check(request.client.host if request.client else "")
            asked = read(kind, await self._json(request))
            self._check_model(asked.model)
            found = await asyncio.to_thread(prompts, asked)
            if len(found) * (asked.n or 1) > self._limits.max_answers:
                most = self._limits.max_answers
                raise ApiError(400, f"n: expected at most {most} answers of a request", param="n", code="invalid_value")
            answers = Answers(self._engine, asked, found, form, self._limits.max_new_tokens)
            if asked.stream:
                response = _EventStream(answers, self._limits.write_timeout, self._note)
            else:
                response = await self._whole(request, answers)
        except ApiError as error:
            response = _written(error)
        except ClientDisconnect:
            response = Response(status_code=499)
        self._metrics.answers.labels(endpoint, str(response.status_code)).inc()
        return response

    async def _whole(self, request: Request, answers: Answers) -> Response:
        """All answers at once; a client that has gone cancels them."""
        try:
            written = await _unless_gone(answers.whole(), request.receive)
            return JSONResponse(written)
        finally:
            answers.cancel()
            self._note(answers)

    def _note(self, answers: Answers) -> None:
        """Count the answers that have ended."""
        for handle in answers.handles:
            if handle.is_done:
                try:
                    self._metrics.observe(handle.result(0))
                except RequestFailedError:
                    continue

    async def _json(self, request: Request) -> Any:
        body = read_body(request, self._limits.max_body_bytes)
        try:
            data = json.loads(await asyncio.wait_for(body, self._limits.body_timeout), parse_constant=_no_number)
            json.dumps(data, ensure_ascii=False).encode()  # half a character may be escaped, and is no text
            return data
        except (ValueError, RecursionError):
            raise ApiError(400, "expected a body of JSON", code="invalid_json") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise ApiError(408, "expected the whole request sooner", code="request_timeout") from None

    def _check_model(self, model: str) -> None:
        if model != self._name:
            message = f"model: expected {self._name!r}, got {model!r:.80}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt of `/v1/completions`."""
        if not isinstance(prompt, str):
            return prompt
        ids = list(self._tokenizer(prompt).input_ids)
        if not ids:
            raise ApiError(400, "prompt: expected at least one token, got none", param="prompt", code="invalid_value")
        return ids


class _EventStream(Response):
    """Answers as server-sent events; when the client is gone, or reads nothing for too long, they are cancelled."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, write_timeout: float, note: Callable[[Answers], None]) -> None:
        self.status_code, self.background = 200, None
        self._answers, self._timeout, self._note = answers, write_timeout, note
        self.init_headers({"cache-control": "no-cache"})
        self.raw_headers = [one for one in self.raw_headers if one[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """As ASGI."""

        async def patient(message: Any) -> None:
            await asyncio.wait_for(send(message), self._timeout)

        async def stream() -> None:
            await patient({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._events():
                await patient({"type": "http.response.body", "body": chunk, "more_body": True})
            await patient({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _unless_gone(stream(), receive)
        except (ClientDisconnect, OSError, asyncio.TimeoutError, TimeoutError):
            _LOG.debug("a client left its stream")
        finally:
            self._answers.cancel()
            self._note(self._answers)

    async def _events(self) -> AsyncIterator[bytes]:
        async for chunk in self._answers.chunks():
            yield b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


async def _unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of `work`, unless the client goes away before.

    Raises:
        ClientDisconnect: it went away.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: Sequence[asyncio.Future[Any]] = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _no_number(name: str) -> Any:
    """NaN and infinities, which are no JSON."""
    raise ValueError(name)


def _written(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _http_error(_: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    return _written(ApiError(error.status_code, str(error.detail), code="not_found"))


async def _own_error(_: Request, error: Exception) -> Response:
    """What should not happen; the server writes it to its log."""
    return _written(ApiError(500, "internal error", code=type(error).__name__))
