"""The target answers: one batch of prompts, turn by turn."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.drafting.base import Drafter
from specdec.generation.generate import generate
from specdec.models.target.target import Target
from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.distill.prompts import Message, Prompt

__all__ = ["Conversation", "Writer", "continue_prompts"]

_SEEDS_OF_A_TURN = 2**32
"""Seeds count prompts up from the run's; later turns and draws of one prompt are this far apart."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The target with what does not change from batch to batch.

    Attributes:
        target: the target.
        tokenizer: its tokenizer.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        drafter: speeds the writing up; None for plain decoding.
        max_new_tokens: most tokens of an answer; fewer where the target ends it, or where its context does.
        seed: of sampling; prompt i has `seed + i`.
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None
    drafter: Drafter | None
    max_new_tokens: int
    seed: int

    def answer(self, prompts: Sequence[Prompt], temperature: float) -> "list[Conversation]":
        """Answer all turns of all prompts; one text does not depend on its companions.

        A conversation whose next question does not fit into the context any more ends before it.
        """
        conversations = [Conversation(self, prompt) for prompt in prompts]
        open_, turn = conversations, 0
        while open_:
            by_limit = defaultdict(list)  # the context ends some rows early, which must not end their companions
            for one in open_:
                by_limit[min(self.max_new_tokens, self.room - len(one.tokens))].append(one)
            for limit, rows in by_limit.items():
                seeds = [self.seed_of(one.prompt, turn) for one in rows]
                starts = [one.tokens for one in rows]
                answers = continue_prompts(
                    self.target, starts, limit, drafter=self.drafter, temperature=temperature, seeds=seeds
                )
                for one, tokens in zip(rows, answers, strict=True):
                    one.add_answer(tokens)
            open_, turn = [one for one in open_ if one.ask_next()], turn + 1
        return conversations

    @property
    def room(self) -> int:
        """Most tokens of a text."""
        return self.target.max_positions

    def seed_of(self, prompt: Prompt, turn: int) -> int:
        """The seed of an answer."""
        return self.seed + prompt.index + turn * _SEEDS_OF_A_TURN


class Conversation:
    """A text that is being written.

    The target's answers stay token for token what it wrote; what the chat template puts between two of them is
    tokenised as part of the conversation's text. Where the template renders an earlier answer in another way (one that
    cuts thoughts off, say), the text is taken as the template has it, and what was answered before is not learnt.

    Attributes:
        prompt: what it begins with.
        tokens: ids so far.
        spans: of each learnt answer, its first token and the one behind its last, its end token included.
        messages: the turns so far.
    """

    def __init__(self, writer: Writer, prompt: Prompt) -> None:
        self.prompt = prompt
        self.tokens = list(prompt.tokens)
        self.spans: list[tuple[int, int]] = []
        self.messages: list[Message] = list(prompt.turns[0]) if prompt.turns else []
        self._writer = writer
        self._text = self._render(self.messages) if len(prompt.turns) > 1 else ""
        self._num_asked = 1

    def add_answer(self, tokens: list[int]) -> None:
        """Append what the target wrote."""
        self.spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        text = self._writer.tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})

    def ask_next(self) -> bool:
        """Append the next question, if there is one and it leaves room for an answer."""
        if self._num_asked >= len(self.prompt.turns):
            return False
        messages = self.messages + list(self.prompt.turns[self._num_asked])
        text = self._render(messages)
        tokens, spans = self._with_question(text)
        if len(tokens) >= self._writer.room:
            return False
        self.tokens, self.spans, self.messages, self._text = tokens, spans, messages, text
        self._num_asked += 1
        return True

    @property
    def num_written(self) -> int:
        """Tokens of its learnt answers."""
        return sum(last - first for first, last in self.spans)

    def record(self) -> dict[str, Any]:
        """What is written of it, as `specdec train` reads it."""
        if len(self.prompt.turns) > 1:
            return {"messages": self.messages, "tokens": self.tokens, "spans": self.spans}
        start = self.spans[0][0]
        prompt, completion = self._writer.tokenizer.decode(self.tokens[:start]), self.messages[-1]["content"]
        return {"prompt": prompt, "completion": completion, "tokens": self.tokens, "prompt_length": start}

    def _with_question(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens and spans of `text`, the rendered conversation with its next question."""
        tokenizer = self._writer.tokenizer
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        before, answer = self._text.rstrip(), self.messages[-1]["content"].strip()
        behind = text.removeprefix(before).lstrip()
        if not text.startswith(before) or not behind.startswith(answer):
            return list(encoded.input_ids), []
        tokens, spans = list(self.tokens), list(self.spans)
        rest = behind.removeprefix(answer)
        if tokens[-1] in self._writer.target.stop_tokens:
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
        return ChatTemplate(self._writer.tokenizer, self._writer.chat_template).render(messages, prompting=True)


def continue_prompts(
    target: Target,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_new_tokens: int,
    *,
    drafter: Drafter | None = None,
    temperature: float = 0.0,
    seeds: Sequence[int],
    ends: Iterable[int] | None = None,
    **generation: Any,
) -> list[list[int]]:
    """What the target writes after each prompt, its end token included.

    Args:
        target: the target.
        prompts: token ids.
        max_new_tokens: most tokens of each continuation.
        drafter: as for `specdec.generate`.
        temperature: 0 for greedy.
        seeds: one per prompt.
        ends: tokens that end a continuation; those of the target's own configuration by default.
        generation: further settings, as for `specdec.generate`.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    stops = frozenset(target.stop_tokens if ends is None else ends)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    output: Any = generate(
        target,
        drafter,
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        seed=list(seeds),
        return_dict_in_generate=True,
        **{"do_sample": False, **sampling, **generation},
    )
    continuations = []
    for row in output.sequences[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
        continuations.append(row if "min_new_tokens" in generation else row[: end + 1])
    return continuations
