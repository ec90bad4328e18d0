"""Tokens to text as they arrive, and on to a terminal."""

from collections.abc import Mapping, Sequence

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdec.common.text_pieces import TextPieces
from specdec.loop.stats import AcceptanceStats

__all__ = ["ACCEPTED_STYLE", "CompletionStream", "chat_prompt", "check_chat_template", "describe_run"]

ACCEPTED_STYLE = "bold green"
"""How accepted draft tokens are printed."""


def check_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Raise ValueError where there is no chat template, neither this one nor the tokenizer's own."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chat_template: expected one, which the tokenizer does not have, got None; "
            "pass --chat-template with a name (chatml, llama2, vicuna) or the model's Jinja file"
        )


def chat_prompt(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> torch.Tensor:
    """[1, T] int64 ids of a conversation up to where the answer begins.

    Args:
        messages: as transformers writes them.
        tokenizer: the target's.
        chat_template: Jinja template; the tokenizer's own by default.

    Raises:
        ValueError: no template, or one that refuses the conversation or writes nothing.
    """
    check_chat_template(tokenizer, chat_template)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except TemplateError as error:
        raise ValueError(f"chat_template: expected one that writes this conversation, got {error}") from error
    ids = tokenizer(text, add_special_tokens=False).input_ids  # templates write the special tokens
    if not ids:
        raise ValueError("chat_template: expected one that writes at least one token, got an empty text")
    return torch.tensor([ids])


class CompletionStream:
    """A streamer for `specdec.generate` that prints the text as it is made, accepted draft tokens in colour.

    A step's last token is the target's own choice; those before it were drafted.

    Args:
        console: where to print.
        tokenizer: the target's.
        show_prompt: print the prompt too, dimmed.

    Attributes:
        tokens: the new tokens so far; also after an interruption.
    """

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase, *, show_prompt: bool = False) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._show_prompt = show_prompt
        self._pieces: TextPieces | None = None
        self.tokens: list[int] = []

    @property
    def text(self) -> str:
        """The new tokens as text."""
        return str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, [1, T], and after it the new tokens of each step."""
        tokens = value.flatten().tolist()
        if self._pieces is None:
            self._pieces = TextPieces(self._tokenizer, tokens)
            if self._show_prompt:
                self._print(self._tokenizer.decode(tokens, skip_special_tokens=True), "dim")
            return
        for index, token in enumerate(tokens):
            self.tokens.append(token)
            self._print(self._pieces.add(token), ACCEPTED_STYLE if index < len(tokens) - 1 else "")

    def end(self) -> None:
        """End the line."""
        self._print("" if self._pieces is None else self._pieces.rest(), "")
        self._console.print()

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


def describe_run(num_tokens: int, stats: AcceptanceStats) -> str:
    """A generation of one row in one line; without a step there is no tau, and capturing one is not in the speed."""
    capture_ms = stats.times_ms.get("capture", 0.0)
    speed = num_tokens / ((sum(stats.times_ms.values()) - capture_ms) / 1e3)
    tau = f"{stats.tau:.2f}" if stats.num_target_passes else "-"
    text = f"{num_tokens} tokens in {stats.num_target_passes} target passes, tau {tau}, {speed:.0f} tok/s"
    if capture_ms:
        text = f"{text}; a step captured in {capture_ms / 1e3:.1f} s"
    return text if stats.lossless else f"{text}, lossy"
