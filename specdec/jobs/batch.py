"""`specdec batch`: a file of prompts to a file of answers.

A line of the output, in the order of the input:

    {"index": 0, "name": "81", "answers": [{"text": "...", "finish_reason": "stop", "num_prompt_tokens": 20,
     "num_new_tokens": 60, "num_steps": 24}], "prompt_hash": "...", "settings": {...}}

A conversation has an answer for each of its turns. What cannot be answered has an `"error"`, and is asked again by the
next run. Nothing of a line depends on who else was answered, but `num_steps` where trees are sized by what runs.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.engine.engine import Engine
from specdec.engine.requests import RequestFailedError
from specdec.jobs.conversations import Conversation, Terms, room_for
from specdec.jobs.parts import Parts
from specdec.jobs.plan import Plan, line_of
from specdec.jobs.prompts import Prompt, Turns, read_prompts
from specdec.jobs.running import Record, Text, sampling
from specdec.jobs.writing import EngineWriter, Writer, write_file

__all__ = ["BatchSettings", "BatchSummary", "answer_file", "answering"]


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How prompts are answered.

    Attributes:
        max_new_tokens: most tokens of an answer; fewer where the target ends it, or where its context does.
        max_length: most tokens of a text, prompt and answers together; the target's context by default. A longer prompt
            is not answered.
        temperature: 0 is greedy.
        top_p: as transformers; 1 keeps all tokens.
        top_k: as transformers; 0 keeps all tokens.
        seed: of sampling; prompt i has `seed + i`.
        stop: texts that end an answer and are no part of it.
        turns: as `read_prompts`.
        chat: as `read_prompts`.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
    """

    max_new_tokens: int = 512
    max_length: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    turns: Turns = "all"
    chat: bool | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_at_least(1, {"max_new_tokens": self.max_new_tokens})
        check_at_least(0, {"seed": self.seed, "top_k": self.top_k})
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if not self.temperature and (self.top_p < 1 or self.top_k):
            drawn = f"top_p {self.top_p}, top_k {self.top_k}"
            raise ValueError(f"temperature: expected more than 0 with {drawn}, got 0, which takes the best token")
        if not all(self.stop):
            raise ValueError("stop: expected texts that are not empty, got an empty one")

    @property
    def request(self) -> dict[str, Any]:
        """As settings of a request, but for length and seed."""
        settings = sampling(self.temperature, top_p=self.top_p, top_k=self.top_k)
        return settings | ({"stop_strings": list(self.stop)} if self.stop else {})

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """What decides a prompt's answer beside the prompt."""
        settings: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        if self.max_length is not None:
            settings["max_length"] = self.max_length
        if self.temperature:
            settings |= {"top_p": self.top_p, "top_k": self.top_k, "seed": self.seed + prompt.index}
        return settings | ({"stop": list(self.stop)} if self.stop else {})


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a run of a batch did, over all processes.

    Attributes:
        written: prompts that it answered.
        present: lines that were there.
        failed: lines with an error.
        num_new_tokens: of the answers that it wrote.
        tau: tokens per step and row of these; NaN without a step.
        seconds: that it took, loading included.
    """

    written: int
    present: int
    failed: int
    num_new_tokens: int
    tau: float
    seconds: float

    def record(self) -> dict[str, Any]:
        """For machines."""
        return {
            "written": self.written,
            "present": self.present,
            "failed": self.failed,
            "num_new_tokens": self.num_new_tokens,
            "tau": round(self.tau, 3) if self.tau == self.tau else None,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(self.num_new_tokens / self.seconds, 1),
        }


def answer_file(
    data: str | Path,
    output: str | Path,
    settings: BatchSettings,
    open_writer: Callable[[int, int], AbstractContextManager[Writer]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    context: int,
) -> BatchSummary:
    """Answer the prompts of a file.

    Args:
        data: a file of any form that `read_prompts` reads, or a data set of the hub.
        output: JSON lines; what is there of the same prompts and settings is kept.
        settings: how they are answered.
        open_writer: is called once there is something to write, with the most tokens of a text, which an engine
            needs as its `max_length`, and the number of texts. `answering` makes a writer of an engine.
        tokenizer: the target's.
        vocab_size: the target's.
        context: tokens that the target has positions for.

    Raises:
        FileNotFoundError: no such data.
        ValueError: malformed data, a `max_length` beyond the context, or an output of other prompts or settings.
        KeyboardInterrupt: the job was told to end; what was written stays.
    """
    began, output = time.monotonic(), Path(output)
    most = context if settings.max_length is None else settings.max_length
    if not 2 <= most <= context:
        raise ValueError(f"max_length: expected 2 to {context}, the model's context, got {most}")
    prompts, refused = read_prompts(
        Path(data),
        tokenizer,
        vocab_size=vocab_size,
        chat_template=settings.chat_template,
        turns=settings.turns,
        chat=settings.chat,
    )
    for prompt in prompts:
        if len(prompt.tokens) >= most:
            refused[prompt.index] = f"a prompt of {len(prompt.tokens)} tokens has no room in {most}"
    usable = [prompt for prompt in prompts if prompt.index not in refused]
    room = room_for(usable, settings.max_new_tokens, most)
    plan = Plan(usable, settings.record, frozenset(refused))
    errors = [{"index": index, "error": reason} for index, reason in sorted(refused.items())]
    present = write_file(plan, output, lambda count: open_writer(room, count), _num_new_tokens, refused=errors)
    lines = [line for _, line in Parts(output, 0).read().values()]
    answers = [one for line in lines if line["index"] not in present for one in line.get("answers", ())]
    num_steps = sum(one["num_steps"] for one in answers)
    in_steps = sum(one["num_new_tokens"] - 1 for one in answers if one["num_steps"])
    return BatchSummary(
        written=sum("error" not in line for line in lines) - len(present),
        present=len(present),
        failed=sum("error" in line for line in lines),
        num_new_tokens=sum(one["num_new_tokens"] for one in answers),
        tau=in_steps / num_steps if num_steps else float("nan"),
        seconds=time.monotonic() - began,
    )


def answering(engine: Engine, settings: BatchSettings) -> EngineWriter:
    """A writer of answers on an engine.

    Args:
        engine: with a tokenizer.
        settings: how prompts are answered.

    Raises:
        ValueError: an engine without a tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("engine: expected one with a tokenizer, got None")
    terms = Terms(
        tokenizer=engine.tokenizer,
        stop_tokens=frozenset(engine.target.stop_tokens),
        room=engine.max_length,
        max_new_tokens=settings.max_new_tokens,
        chat_template=settings.chat_template,
        seed=settings.seed,
    )
    return EngineWriter(engine, lambda prompt: _answered(Conversation(terms, prompt), settings))


def _answered(conversation: Conversation, settings: BatchSettings) -> Text[Record]:
    """The line of a prompt."""
    prompt, error = conversation.prompt, None
    try:
        yield from conversation.written(settings.request)
    except RequestFailedError as failed:
        error = str(failed)
    num_missing = prompt.num_answers - len(conversation.answers)
    if num_missing and error is None:
        error = f"the last {num_missing} of {prompt.num_answers} turns have no room in {conversation.terms.room} tokens"
    answers = [
        {
            "text": one.text,
            "finish_reason": one.result.finish_reason,
            "num_prompt_tokens": one.num_prompt_tokens,
            "num_new_tokens": len(one.result.tokens),
            "num_steps": len(one.result.stats.num_emitted[0]),
        }
        for one in conversation.answers
    ]
    written: Record = ({"name": prompt.name} if prompt.name else {}) | {"answers": answers}
    return line_of(prompt, written if error is None else written | {"error": error}, settings.record(prompt))


def _num_new_tokens(record: Mapping[str, Any]) -> int:
    return sum(one["num_new_tokens"] for one in record["answers"])
