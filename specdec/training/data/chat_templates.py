"""Chat templates: those that ship, by name, and a template with its tokenizer.

A template turns a conversation into text, by the rules that its model was trained with. Most tokenizers carry one. For
those that do not, as Vicuna's, three ship: `chatml`, `llama2` and `vicuna`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from specdec.training.data.samples import UnusableError

__all__ = ["ChatTemplate", "chat_template_text", "shipped_templates"]

_FOLDER = Path(__file__).parent / "templates"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what transformers looks for
_PROBE = ("Which is the first?", "That is the second.", "Is this the third?")


def shipped_templates() -> tuple[str, ...]:
    """Names of the templates that ship."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.jinja")))


def chat_template_text(name: str | Path) -> str:
    """The Jinja text of a template.

    Args:
        name: of one that ships, or a file.

    Raises:
        FileNotFoundError: it is neither.
    """
    if str(name) in shipped_templates():
        return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    if not Path(name).is_file():
        names = ", ".join(shipped_templates())
        raise FileNotFoundError(f"chat_template: expected one of {names}, or a Jinja file, got {name}")
    return Path(name).read_text(encoding="utf-8")


class ChatTemplate:
    """A tokenizer with the chat template by which it writes conversations.

    Args:
        tokenizer: the target's.
        text: the template in Jinja; the tokenizer's own by default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._text = text
        self._is_checked = False

    def marks_answers(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template says by itself what the assistant writes (`{% generation %}`)."""
        return bool(_GENERATION.search(self.tokenizer.get_chat_template(self._text, tools)))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, prompting: bool = False
    ) -> str:
        """A conversation as text.

        Args:
            messages: as transformers wants them.
            tools: descriptions of functions, for templates that show them.
            prompting: end with what stands before an answer.

        Raises:
            UnusableError: the template refuses the conversation.
            ValueError: there is none, or it is no Jinja.
        """
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=prompting))

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a conversation up to where its next answer begins.

        Args:
            messages: as transformers wants them.
            tools: descriptions of functions, for templates that show them.

        Raises:
            UnusableError: the template refuses the conversation.
            ValueError: there is none, it is no Jinja, or it writes nothing.
        """
        text = self.render(messages, tools, prompting=True)
        ids = list(self.tokenizer(text, add_special_tokens=False).input_ids)  # templates write the special tokens
        if not ids:
            raise ValueError("chat_template: expected one that writes at least one token, got an empty text")
        return ids

    def encode_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them the template marks as the assistant's.

        Raises:
            UnusableError: the template refuses the conversation.
        """
        encoded = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, **settings: Any) -> Any:
        self.check_is_there()
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools and list(tools),
                chat_template=self._text,
                **settings,
            )
        except TemplateSyntaxError as error:
            raise ValueError(f"chat_template: expected a Jinja template, got line {error.lineno}: {error}") from error
        except Exception as error:  # templates raise what they like, about turns that do not alternate
            raise UnusableError("with turns that the chat template refuses", str(error)) from error

    @property
    def is_there(self) -> bool:
        """Whether there is a template, this one or the tokenizer's own."""
        return self._text is not None or bool(getattr(self.tokenizer, "chat_template", None))

    def check_is_there(self) -> None:
        """Raise ValueError where there is no template."""
        if not self.is_there:
            names = ", ".join(shipped_templates())
            raise ValueError(
                "chat_template: expected one, which the tokenizer does not have, got None; "
                f"pass --chat-template with the one of the model's family: {names}, or a Jinja file"
            )

    def check(self) -> None:
        """Try the template on the plainest conversation.

        Raises:
            ValueError: there is none, or it cannot serve: it is no Jinja, refuses a question and its answer, leaves
                one of them out, or writes all roles in one way.
        """
        if self._is_checked:
            return
        self._is_checked = True
        asked, answered, again = _PROBE
        question = {"role": "user", "content": asked}
        messages = [question, {"role": "assistant", "content": answered}]
        try:
            short = self.render(messages)
        except UnusableError as error:
            refusal = f"got one that refuses them: {error.detail}"
            raise ValueError(f"chat_template: expected one that writes questions and answers, {refusal}") from error
        if answered not in short or asked not in short:
            raise ValueError(
                f"chat_template: expected one that writes questions and answers, got one that makes {short!r:.200} of "
                f"the question {asked!r} and the answer {answered!r}"
            )
        try:
            text = self.render([*messages, {"role": "user", "content": again}], prompting=True)
        except UnusableError:  # it may be made for one question
            return
        places = [text.find(turn) for turn in _PROBE]
        if -1 in places:
            return  # it writes earlier turns in another way, which is its own affair
        between = [text[start + len(turn) : end] for start, turn, end in zip(places, _PROBE, places[1:], strict=False)]
        if between[0] == between[1]:
            raise ValueError(
                "chat_template: expected one that tells the user's turns from the assistant's, got one that writes "
                f"{between[0]!r} in front of both"
            )
