"""Texts that an engine writes side by side, each of one request after the other.

A text is a generator: it yields an `Ask`, gets the `RequestResult` back, and in the end returns its record.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from specdec.engine.engine import Engine
from specdec.engine.requests import EngineClosedError, Handle, RequestFailedError, RequestResult

__all__ = ["Ask", "Record", "Text", "run_texts", "sampling"]

T = TypeVar("T")
Record: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that a text waits for.

    Attributes:
        prompt: token ids.
        settings: as for `Engine.submit`.
    """

    prompt: Sequence[int]
    settings: Mapping[str, Any]


Text: TypeAlias = Generator[Ask, RequestResult, T]
"""What is asked one after the other, and what comes of it."""


def sampling(temperature: float, *, top_p: float = 1.0, top_k: int = 0) -> dict[str, Any]:
    """Settings of a request that samples, greedily at temperature 0."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def run_texts(engine: Engine, texts: Iterable[Text[Record]], on_end: Callable[[Record], None]) -> None:
    """Run texts to their ends, in the order in which they come; twice as many as there are rows are open at a time.

    A request that fails alone is raised inside its text, which may make a record of that. On any other error the
    requests that run are cancelled.

    Args:
        engine: decodes.
        texts: are begun as there is room for them.
        on_end: gets the record of each text that has ended, in the order of the ends.

    Raises:
        RequestFailedError: the model failed for all, or a text did not expect it.
        EngineClosedError: the engine was closed meanwhile.
        ValueError, TypeError: a text asks for what the engine refuses.
    """
    ended: SimpleQueue[Handle] = SimpleQueue()
    open_: dict[int, tuple[Handle, Text[Record]]] = {}
    most = engine.max_rows + min(engine.max_rows, engine.max_queue)

    def tell(handle: Handle) -> None:
        if handle.is_done:
            ended.put(handle)

    def go_on(text: Text[Record], advance: Callable[[], Ask]) -> None:
        try:
            ask = advance()
        except StopIteration as end:
            on_end(end.value)
            return
        handle = engine.submit(ask.prompt, on_progress=tell, **ask.settings)
        open_[handle.id] = handle, text

    coming = iter(texts)
    try:
        while True:
            while len(open_) < most and (text := next(coming, None)) is not None:
                go_on(text, text.__next__)
            if not open_:
                return
            _, text = open_.pop((handle := ended.get()).id)
            try:
                result = handle.result(0)
                if result.finish_reason == "cancelled":
                    raise EngineClosedError("engine: expected one that stays open until all texts have ended")
            except RequestFailedError as error:
                if not error.is_alone:
                    raise
                go_on(text, partial(text.throw, error))
            else:
                go_on(text, partial(text.send, result))
    finally:
        for handle, text in open_.values():
            handle.cancel()
            text.close()
