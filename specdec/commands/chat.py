"""`specdec chat`: a conversation with any model in the terminal.

An answer is one call of `specdec.generate`, whose prompt is the whole conversation as the chat template writes it.
"""

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.commands.common.acceptance import add_acceptance, add_sampling, sampling_of
from specdec.commands.common.options import (
    add_chat_template,
    add_decoding,
    chat_template_of,
    check_positive,
    given,
    load_for_decoding,
)

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from specdec.commands.common.options import Commands
    from specdec.drafting.base import Drafter
    from specdec.models.target.target import Target

__all__ = ["Chat", "add_to", "run_chat"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("chat", help="talk with a model; accepted draft tokens are in colour")
    add_decoding(parser, max_new_tokens=512)
    add_acceptance(parser)
    add_sampling(parser)
    parser.add_argument("--system", help="message that the conversation begins with")
    add_chat_template(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    check_positive(options, "max_new_tokens", "prefill_chunk_size")
    template = chat_template_of(options)
    limits = {"max_new_tokens": options.max_new_tokens, "seed": options.seed}
    generation = {**sampling_of(options), **given(options, "prefill_chunk_size")}
    chat = Chat(*load_for_decoding(options), options.system, template, **limits, generation=generation)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then edits lines and remembers them
    console = Console(highlight=False)
    console.print(f"{options.model} with {chat.drafter.kind}; /reset begins anew, /exit leaves", style="dim")
    run_chat(chat, console, lambda: input("> " if is_interactive else ""))
    return 0


@dataclass
class Chat:
    """A conversation with a model.

    Attributes:
        target: the model.
        drafter: what proposes tokens for it.
        tokenizer: the target's.
        system: message that every conversation begins with.
        chat_template: Jinja template; the tokenizer's own by default.
        max_new_tokens: most tokens of an answer; the rest of the context where that is less.
        seed: of sampling; answer number n, from 0, takes `seed + n`. None draws seeds from PyTorch's generator.
        generation: further settings, as for `specdec.generate`.
        messages: the conversation so far, as transformers writes messages.

    Raises:
        ValueError: no chat template.
    """

    target: "Target"
    drafter: "Drafter"
    tokenizer: "PreTrainedTokenizerBase"
    system: str | None = None
    chat_template: str | None = None
    max_new_tokens: int = 512
    seed: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        from specdec.training.data.chat_templates import ChatTemplate

        ChatTemplate(self.tokenizer, self.chat_template).check_is_there()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, all but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str, console: "Console") -> None:
        """Print the model's answer to `text`, and a line about how it came about; Ctrl-C ends the answer alone.

        What was written before an interruption stays in the conversation.

        Raises:
            ValueError: a bad setting, or a conversation that the chat template refuses.
        """
        from specdec.commands.common.text import CompletionStream, chat_prompt, describe_run
        from specdec.generation.generate import SpecDecodeOutput, generate

        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = chat_prompt(messages, self.tokenizer, self.chat_template).to(self.target.device)
        room = self.target.max_positions - prompt.shape[1]
        if room < 1:
            context = self.target.max_positions
            console.print(f"no room in the model's context of {context} tokens; /reset begins anew", style="dim")
            return
        stream = CompletionStream(console, self.tokenizer)
        settings = {"max_new_tokens": min(self.max_new_tokens, room), "seed": self.seed, **self.generation}
        try:
            output = generate(
                self.target, self.drafter, prompt, streamer=stream, return_dict_in_generate=True, **settings
            )
            assert isinstance(output, SpecDecodeOutput)
            assert output.stats is not None
            line = describe_run(len(stream.tokens), output.stats)
        except KeyboardInterrupt:
            stream.end()
            line = "interrupted"
        if stream.tokens:
            self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        if self.seed is not None:
            self.seed += 1
        console.print(line, style="dim")


def run_chat(chat: Chat, console: "Console", read: Callable[[], str]) -> None:
    """Answer line by line until `/exit` or the end of the input.

    Args:
        chat: the conversation.
        console: where to print.
        read: gives the next line; EOFError ends the chat, and KeyboardInterrupt drops the line.
    """
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves", style="dim")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
            console.print("the conversation begins anew", style="dim")
        elif re.fullmatch(r"/\w+", line):
            console.print(f"{line}: no such command; there are /reset and /exit", style="dim")
        elif line:
            chat.answer(line, console)
