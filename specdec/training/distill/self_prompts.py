"""The target asks itself: a chat model that is given the beginning of a user's turn continues it with a question.

Source: Magpie (arXiv:2406.08464), section 2. Here a turn that does not end, or that holds special tokens, is drawn
again, each time with a seed of its own, so that a prompt depends on its index and the run's seed alone.
"""

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.jobs.conversations import Terms
from specdec.jobs.prompts import Prompt
from specdec.jobs.running import Ask, Text, sampling
from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.samples import UnusableError

__all__ = ["SelfPrompts", "UserTurn", "drawn_prompt"]

MAX_DRAWS = 64
"""Draws of one prompt after which the model is taken for one that asks no questions."""

_FIRST_DRAW = 2**16  # seeds of draws lie behind those of all turns
_PLACE = "SPECDECUSERTURN"  # stands for what a user says, in a rendered template


@dataclass(frozen=True, slots=True)
class SelfPrompts:
    """Prompts that the target makes up, as the user of its own chat template.

    Attributes:
        count: how many.
        temperature: of drawing them, above 0.
        max_tokens: most tokens of one; a turn that is not over by then is drawn again.
    """

    count: int
    temperature: float = 1.0
    max_tokens: int = 64

    def __post_init__(self) -> None:
        """Check the values."""
        check_at_least(1, {"self_prompts": self.count, "prompt_tokens": self.max_tokens})
        if not self.temperature > 0:
            raise ValueError(
                f"prompt_temperature: expected more than 0, without which all are the same, got {self.temperature}"
            )


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user's turn in a chat template.

    Attributes:
        head: ids of everything that the template puts before the user's text.
        end_token: the special token that ends the turn; None if a text does.
        end_text: that text, such as `[/INST]`.
        length: tokens of a prompt of one token.
    """

    head: tuple[int, ...]
    end_token: int | None
    end_text: str
    length: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> "UserTurn":
        """Read it off a chat template.

        Raises:
            ValueError: there is no template, or none in which a user's turn has a beginning and an end.
        """
        try:
            template = ChatTemplate(tokenizer, chat_template)
            text = template.render([{"role": "user", "content": _PLACE}], prompting=True)
        except UnusableError as error:
            raise ValueError(f"self_prompts: expected a chat template that takes a user's turn, got {error}") from error
        before, found, after = text.partition(_PLACE)
        # a blank in front of the text is part of its first token
        head = tokenizer(before.rstrip(" "), add_special_tokens=False).input_ids
        if not found or not head or not after.strip():
            raise ValueError(
                "self_prompts: expected a chat template with something before and behind what a user says, "
                f"got {text!r:.200}"
            )
        first = tokenizer(after, add_special_tokens=False).input_ids[0]
        is_special = first in _special_tokens(tokenizer)
        length = len(template.prompt([{"role": "user", "content": "."}]))
        return cls(tuple(head), first if is_special else None, after.strip(), length)


def drawn_prompt(terms: Terms, prompt: Prompt, turn: UserTurn, how: SelfPrompts) -> Text[Prompt]:
    """Let the target make up a prompt.

    Raises:
        ValueError: it was drawn `MAX_DRAWS` times in vain.
    """
    settings: dict[str, Any] = {"max_new_tokens": how.max_tokens, **sampling(how.temperature)}
    if turn.end_token is None:
        settings["stop_strings"] = [turn.end_text]
    else:
        settings["eos_token_id"] = sorted({*terms.stop_tokens, turn.end_token})
    for draw in range(MAX_DRAWS):
        result = yield Ask(turn.head, settings | {"seed": terms.seed_of(prompt, _FIRST_DRAW + draw)})
        drawn = _prompt(terms, prompt, turn, result.tokens)
        if drawn is not None:
            return drawn
    raise ValueError(
        f"self_prompts: expected the target to write a user's turn of at most {how.max_tokens} tokens, "
        f"got none in {MAX_DRAWS} draws; is it a chat model, and the chat template its own?"
    )


def _prompt(terms: Terms, prompt: Prompt, turn: UserTurn, tokens: list[int]) -> Prompt | None:
    """A drawn turn as a prompt; None if it has not ended, says nothing, or holds special tokens."""
    tokenizer = terms.tokenizer
    if turn.end_token is not None:
        *body, last = tokens
        has_ended = last == turn.end_token or last in terms.stop_tokens
        text = tokenizer.decode(body)
    else:
        body = tokens
        text, end, _ = tokenizer.decode(tokens).partition(turn.end_text)
        has_ended = bool(end)
    if not has_ended or not text.strip() or not _special_tokens(tokenizer).isdisjoint(body):
        return None
    message = {"role": "user", "content": text.strip()}
    ids = ChatTemplate(tokenizer, terms.chat_template).prompt([message])
    return replace(prompt, tokens=tuple(ids), turns=((message,),)) if len(ids) < terms.room else None


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    return frozenset(added | set(tokenizer.all_special_ids))
