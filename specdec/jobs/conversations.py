"""A text while it is written: answer by answer, with what the chat template puts between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.engine.requests import RequestResult
from specdec.jobs.prompts import Message, Prompt
from specdec.jobs.running import Ask, Text
from specdec.training.data.chat_templates import ChatTemplate

__all__ = ["Answer", "Conversation", "Terms", "room_for"]

_SEEDS_OF_A_TURN = 2**32
"""Seeds count prompts up from the job's; later turns and draws of one prompt are this far apart."""

_SLACK = 8  # tokens by which a later question may be longer than it is by itself


@dataclass(frozen=True, slots=True)
class Terms:
    """What all texts of a job have in common.

    Attributes:
        tokenizer: the target's.
        stop_tokens: those that end an answer.
        room: most tokens of a text, questions and answers together.
        max_new_tokens: most tokens of an answer; fewer where the target ends it, or where the room does.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        seed: of sampling; prompt i has `seed + i`.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: frozenset[int]
    room: int
    max_new_tokens: int
    chat_template: str | None = None
    seed: int = 0

    def seed_of(self, prompt: Prompt, turn: int) -> int:
        """The seed of an answer, or of a draw."""
        return self.seed + prompt.index + turn * _SEEDS_OF_A_TURN


def room_for(prompts: list[Prompt], max_new_tokens: int, most: int) -> int:
    """Tokens of the longest text that can come of prompts: what the memory of a row must hold.

    Args:
        prompts: what is answered.
        max_new_tokens: most tokens of an answer.
        most: the target's context, which no text is longer than.
    """
    needed = [one.length + one.num_answers * (max_new_tokens + _SLACK) - _SLACK for one in prompts]
    return max(2, min(most, max(needed, default=2)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said.

    Attributes:
        text: without special tokens and without the stop string that ended it.
        num_prompt_tokens: tokens before it.
        result: what the engine says of it.
    """

    text: str
    num_prompt_tokens: int
    result: RequestResult


@dataclass(slots=True)
class Conversation:
    """A text that is being written.

    The target's answers stay token for token what it wrote; what the chat template puts between two of them is
    tokenised as part of the conversation's text. Where the template renders an earlier answer in another way (one that
    cuts thoughts off, say), or a stop string cut it off, the text is taken as the template has it, and what was
    answered before is not learnt.

    Attributes:
        terms: what it has in common with others.
        prompt: what it begins with.
        tokens: ids so far.
        spans: of each learnt answer, its first token and the one behind its last, its end token included.
        messages: the turns so far.
        answers: those so far.
    """

    terms: Terms
    prompt: Prompt
    tokens: list[int] = field(init=False)
    spans: list[tuple[int, int]] = field(init=False, default_factory=list)
    messages: list[Message] = field(init=False)
    answers: list[Answer] = field(init=False, default_factory=list)
    _text: str = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        turns = self.prompt.turns
        self.tokens = list(self.prompt.tokens)
        self.messages = list(turns[0]) if turns else []
        self._text = self._render(self.messages) if len(turns) > 1 else ""

    def written(self, settings: Mapping[str, Any]) -> Text[None]:
        """Write all answers, each a request.

        A conversation whose next question does not fit into the room any more ends before it.

        Args:
            settings: of every request, as for `Engine.submit`; length and seed are set here.
        """
        terms = self.terms
        while True:
            limit = min(terms.max_new_tokens, terms.room - len(self.tokens))
            seed = terms.seed_of(self.prompt, len(self.answers))
            self._add_answer((yield Ask(list(self.tokens), {"max_new_tokens": limit, "seed": seed, **settings})))
            if not self._ask_next():
                return

    @property
    def num_written(self) -> int:
        """Tokens of its learnt answers."""
        return sum(last - first for first, last in self.spans)

    def record(self) -> dict[str, Any]:
        """What is written of it, as `specdec train` reads it."""
        if len(self.prompt.turns) > 1:
            return {"messages": self.messages, "tokens": self.tokens, "spans": self.spans}
        start = self.spans[0][0]
        prompt, completion = self.terms.tokenizer.decode(self.tokens[:start]), self.messages[-1]["content"]
        return {"prompt": prompt, "completion": completion, "tokens": self.tokens, "prompt_length": start}

    def _add_answer(self, result: RequestResult) -> None:
        """Append what the target wrote."""
        start = len(self.tokens)
        self.tokens += result.tokens
        self.spans.append((start, len(self.tokens)))
        text = str(self.terms.tokenizer.decode(result.tokens, skip_special_tokens=True))
        if result.stop_string is not None:
            text = text.partition(result.stop_string)[0]
        self.messages.append({"role": "assistant", "content": text})
        self.answers.append(Answer(text, start, result))

    def _ask_next(self) -> bool:
        """Append the next question, if there is one and it leaves room for an answer."""
        num_asked = len(self.answers)
        if num_asked >= len(self.prompt.turns):
            return False
        messages = self.messages + list(self.prompt.turns[num_asked])
        text = self._render(messages)
        tokens, spans = self._with_question(text)
        if len(tokens) >= self.terms.room:
            return False
        self.tokens, self.spans, self.messages, self._text = tokens, spans, messages, text
        return True

    def _with_question(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens and spans of `text`, the rendered conversation with its next question."""
        tokenizer = self.terms.tokenizer
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        before, answer = self._text.rstrip(), self.answers[-1].text.strip()
        behind = text.removeprefix(before).lstrip()
        is_cut = self.answers[-1].result.stop_string is not None
        if is_cut or not text.startswith(before) or not behind.startswith(answer):
            return list(encoded.input_ids), []
        tokens, spans = list(self.tokens), list(self.spans)
        rest = behind.removeprefix(answer)
        if tokens[-1] in self.terms.stop_tokens:
            end = tokenizer.decode(tokens[-1:])
            if rest.lstrip().startswith(end):
                rest = rest.lstrip().removeprefix(end)
            else:  # the template ends turns in a way of its own
                tokens.pop()
                spans[-1] = (spans[-1][0], spans[-1][1] - 1)
        place = len(text) - len(rest)
        if any(first < place < last for first, last in encoded.offset_mapping):
            return tokens + list(tokenizer(rest, add_special_tokens=False).input_ids), spans
        ids = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
        return tokens + [token for token, (first, _) in ids if first >= place], spans

    def _render(self, messages: list[Message]) -> str:
        return ChatTemplate(self.terms.tokenizer, self.terms.chat_template).render(messages, prompting=True)
