"""Tokens to text as they arrive, and on to a terminal."""

from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdec.common.text_pieces import TextPieces
from specdec.loop.stats import AcceptanceStats
from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.samples import UnusableError

__all__ = ["ACCEPTED_STYLE", "CompletionStream", "chat_prompt", "describe_run"]

ACCEPTED_STYLE = "bold green"
"""How accepted draft tokens are printed."""


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
    try:
        return torch.tensor([ChatTemplate(tokenizer, chat_template).prompt(messages)])
    except UnusableError as error:
        raise ValueError(f"chat_template: expected one that writes this conversation, got {error.detail}") from error


class CompletionStream:
    """A streamer for `specdec.generate` that prints the text as it is made, accepted draft tokens in colour.

    A step's last token is the target's own choice; those before it were drafted.

    Args:
        console: where to print.
        tokenizer: the target's.
        show_prompt: print the prompt too, dimmed.
        marks: what to put before and behind the accepted tokens of a step, for where there are no colours.

    Attributes:
        tokens: the new tokens so far; also after an interruption.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: PreTrainedTokenizerBase,
        *,
        show_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._show_prompt = show_prompt
        self._marks = marks
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
        self.tokens += tokens
        pieces = [self._pieces.add(token) for token in tokens]
        if accepted := "".join(pieces[:-1]):
            self._print(f"{self._marks[0]}{accepted}{self._marks[1]}", ACCEPTED_STYLE)
        self._print("".join(pieces[-1:]), "")

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
