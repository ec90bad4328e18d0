"""What clients may ask, in the form of OpenAI's API; what would change a text and is unknown is refused by name."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

__all__ = ["ApiError", "ChatRequest", "CompletionRequest", "GenerationRequest", "read"]

_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that change no text, and are taken without a word."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0)),
    **dict.fromkeys(
        ("logit_bias", "suffix", "tools", "functions", "tool_choice", "function_call"), (None, "none", {}, [])
    ),
    **dict.fromkeys(("modalities", "audio", "prediction", "reasoning_effort", "web_search_options"), (None, ["text"])),
    "best_of": (None, 1),
    "echo": (None, False),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
}
"""Fields that are not supported, and the values that ask for nothing."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form.

    Args:
        status: of HTTP.
        message: for people.
        param: the field that is wrong.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """How a stream is to be."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


Stop: TypeAlias = str | Annotated[list[str], Field(max_length=4)] | None


class GenerationRequest(BaseModel):
    """What both endpoints take.

    Attributes:
        model: the served model's name.
        temperature: 0 takes the most probable token.
        top_p: as `generate`.
        top_k: as `generate`; 0 keeps all tokens.
        min_p: as `generate`.
        repetition_penalty: as `generate`.
        max_tokens: most new tokens.
        stop: texts that end an answer, and are no part of it.
        n: answers to each prompt.
        seed: of sampling; answers of one request have seeds of their own.
        stream: tell the text as it is made.
        stream_options: how.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """Drop what asks for nothing, refuse what is not supported."""
        if not isinstance(data, dict):
            raise ValueError("expected an object")
        for name, neutral in _NEUTRAL.items():
            if name in data and not any(_is_same(data[name], one) for one in neutral):
                raise ValueError(f"{name}: expected its default, which alone is supported")
        return {name: value for name, value in data.items() if name not in _IGNORED and name not in _NEUTRAL}

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected none without stream=true")
        if any(not one for one in self.stops):
            raise ValueError("stop: expected texts of at least one character")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of every token whose log-probabilities are told; None for none."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """Most new tokens, if the client says."""
        return self.max_tokens


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; true is no number."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


Tokens: TypeAlias = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """`/v1/completions`.

    Attributes:
        prompt: a text, or token ids, or several of one of them.
        logprobs: alternatives of every token to tell.
    """

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """As `GenerationRequest`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """`/v1/chat/completions`.

    Attributes:
        messages: the conversation.
        max_completion_tokens: the newer name of `max_tokens`.
        logprobs: whether log-probabilities are told.
        top_logprobs: of how many alternatives.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected none without logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_completion_tokens: expected max_tokens or nothing beside it")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As `GenerationRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """As `GenerationRequest`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def read(kind: type[GenerationRequest], data: Any) -> GenerationRequest:
    """A request from what was sent.

    Raises:
        ApiError: 400, with the first field that is wrong.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [str(one) for one in first["loc"] if not str(one).startswith(("function-", "list[", "constrained-"))]
        message = first["msg"].removeprefix("Value error, ")
        name = place[0] if place else message.partition(":")[0] if ":" in message else None
        shown = f"{'.'.join(place)}: {message}" if place else message
        raise ApiError(400, shown, param=name, code="invalid_value") from None
