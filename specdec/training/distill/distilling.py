"""`specdec distill`: prompts to a file of texts that the target wrote, as drafters learn from them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.drafting.base import Drafter
from specdec.engine.engine import Engine
from specdec.jobs.conversations import Conversation, Terms, room_for
from specdec.jobs.plan import Plan, line_of
from specdec.jobs.prompts import Prompt, Turns, read_prompts
from specdec.jobs.running import Record, Text, sampling
from specdec.jobs.writing import EngineWriter, write_file
from specdec.models.target.target import Target
from specdec.training.distill.self_prompts import SelfPrompts, UserTurn, drawn_prompt

__all__ = ["distill"]

logger = logging.getLogger(__name__)


def distill(
    target: PreTrainedModel | Target,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | None,
    output: str | Path,
    *,
    self_prompts: SelfPrompts | None = None,
    turns: Turns = "all",
    max_new_tokens: int = 512,
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 16,
    drafter: Drafter | PreTrainedModel | str | None = None,
    chat_template: str | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """Let the target answer prompts, and write what `specdec train` reads.

    Lines have the exact `tokens` and say which of them the target wrote: those from `prompt_length` on, beside `prompt`
    and `completion`; or the `spans` of a conversation of several answers, beside its `messages`. They are in the order
    of the prompts. Under torchrun the texts are divided over the processes, each of which holds the whole target.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        data: JSON lines: `{"prompt"}`, `{"text"}`, or conversations; None for `self_prompts` alone.
        output: JSON lines. What is there already is not written again; nothing else changes before the end, when all
            parts (see `specdec.jobs.parts`) become one file.
        self_prompts: prompts that the target makes up, behind those of the data.
        turns: `"all"`: the target writes every answer of a conversation, each after its own earlier ones; `"last"`:
            only the last one, after those that were given.
        max_new_tokens: most tokens of an answer; fewer where the target ends it, or where its context does.
        temperatures: texts take them in turn; 0 is greedy.
        batch_size: texts written side by side.
        drafter: speeds the writing up; it does not change the texts' law. As for `specdec.Engine`.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        seed: of sampling.

    Returns:
        `written`, `present` (lines that were there) and `skipped` (prompts too long for the target's context, or that
        the chat template refuses), over all processes.

    Raises:
        FileNotFoundError: no such data.
        ValueError: bad arguments, malformed data, or an `output` that belongs to other prompts or settings.
        NotImplementedError: several processes that share one target.
    """
    target = target if isinstance(target, Target) else Target(target)
    _check(target, turns, max_new_tokens, temperatures, batch_size, seed)
    prompts, num_refused, user_turn = _prompts(target, tokenizer, data, self_prompts, turns, chat_template)
    usable = [prompt for prompt in prompts if len(prompt.tokens) < target.max_positions]
    terms = Terms(
        tokenizer=tokenizer,
        stop_tokens=frozenset(target.stop_tokens),
        room=room_for(usable, max_new_tokens, target.max_positions),
        max_new_tokens=max_new_tokens,
        chat_template=chat_template,
        seed=seed,
    )

    law = _Law(max_new_tokens, temperatures, seed, self_prompts)
    plan = Plan(usable, law.record)

    def text_of(prompt: Prompt) -> Text[Record]:
        asked = prompt
        if prompt.is_self_made and self_prompts is not None and user_turn is not None:
            asked = yield from drawn_prompt(terms, prompt, user_turn, self_prompts)
        conversation = Conversation(terms, asked)
        yield from conversation.written(sampling(law.temperature(prompt)))
        return line_of(prompt, conversation.record(), law.record(prompt))

    def open_writer(count: int) -> EngineWriter:
        num_rows = min(batch_size, count)
        engine = Engine(target, drafter, tokenizer=tokenizer, max_rows=num_rows, max_length=terms.room)
        return EngineWriter(engine, text_of)

    present = write_file(plan, Path(output), open_writer, _num_written)
    counts = {
        "written": len(usable) - len(present),
        "present": len(present),
        "skipped": len(prompts) - len(usable) + num_refused,
    }
    logger.info("distill: %s", counts)
    return counts


@dataclass(frozen=True, slots=True)
class _Law:
    """What decides texts beside their prompts."""

    max_new_tokens: int
    temperatures: Sequence[float]
    seed: int
    self_prompts: SelfPrompts | None

    def temperature(self, prompt: Prompt) -> float:
        """What its answers are sampled at."""
        return float(self.temperatures[prompt.index % len(self.temperatures)])

    def record(self, prompt: Prompt) -> dict[str, Any]:
        """For the prompt's line."""
        record = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature(prompt)}
        if prompt.is_self_made or record["temperature"]:
            record["seed"] = self.seed + prompt.index
        if prompt.is_self_made and self.self_prompts is not None:
            record |= {"prompt_temperature": self.self_prompts.temperature}
            record |= {"prompt_tokens": self.self_prompts.max_tokens}
        return record


def _check(
    target: Target, turns: str, max_new_tokens: int, temperatures: Sequence[float], batch_size: int, seed: int
) -> None:
    """Raise for bad arguments of `distill`."""
    if target.sharding is not None:
        raise NotImplementedError("target: expected a whole one in every process, got one that is sharded over them")
    if turns not in ("all", "last"):
        raise ValueError(f"turns: expected 'all' or 'last', got {turns!r}")
    check_at_least(1, {"max_new_tokens": max_new_tokens, "batch_size": batch_size})
    check_at_least(0, {"seed": seed})
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures: expected one or more of at least 0, got {list(temperatures)}")


def _prompts(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | None,
    self_prompts: SelfPrompts | None,
    turns: Turns,
    chat_template: str | None,
) -> tuple[list[Prompt], int, UserTurn | None]:
    """What is answered, how many rows were refused, and with prompts to make up what they begin with."""
    if data is None and self_prompts is None:
        raise ValueError("data: expected a file, self_prompts or both, got neither")
    user_turn = None if self_prompts is None else UserTurn.of(tokenizer, chat_template)
    prompts: list[Prompt] = []
    refused: dict[int, str] = {}
    if data is not None:
        prompts, refused = read_prompts(
            Path(data), tokenizer, vocab_size=target.vocab_size, chat_template=chat_template, turns=turns
        )
    if self_prompts is not None and user_turn is not None:
        first = len(prompts) + len(refused)
        length = user_turn.length + self_prompts.max_tokens
        if length > target.max_positions:
            raise ValueError(
                f"prompt_tokens: expected at most {target.max_positions - user_turn.length}, for which the target has "
                f"room, got {self_prompts.max_tokens}"
            )
        prompts += [
            Prompt(first + i, user_turn.head, is_self_made=True, length=length) for i in range(self_prompts.count)
        ]
    return prompts, len(refused), user_turn


def _num_written(record: Record) -> int:
    """Tokens of a line that the target wrote."""
    spans = record.get("spans") or [(record.get("prompt_length", 0), len(record["tokens"]))]
    return sum(last - first for first, last in spans)
