"""`specdec generate`: the completion of a prompt."""

import argparse
import json
import sys
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
    from transformers import PreTrainedTokenizerBase

    from specdec.commands.common.options import Commands
    from specdec.loop.stats import AcceptanceStats

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("generate", help="complete a prompt")
    add_decoding(parser, max_new_tokens=128)
    add_acceptance(parser)
    add_sampling(parser)
    parser.add_argument("--prompt", required=True, help="text to complete; '-' reads standard input")
    chat = "the prompt is what a user says to a chat model, whose template goes around it"
    parser.add_argument("--chat", action="store_true", help=chat)
    add_chat_template(parser)
    parser.add_argument("--json", action="store_true", help="print tokens, text and statistics as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from specdec.commands.common.text import CompletionStream, chat_prompt, describe_run
    from specdec.generation.generate import SpecDecodeOutput, generate

    check_positive(options, "max_new_tokens", "prefill_chunk_size")
    sampling = sampling_of(options)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    target, drafter, tokenizer = load_for_decoding(options)
    if options.chat:
        prompt = chat_prompt([{"role": "user", "content": text}], tokenizer, chat_template_of(options))
    else:
        prompt = tokenizer(text, return_tensors="pt").input_ids.long()
    if prompt.numel() == 0:
        raise ValueError("--prompt: expected at least one token, got an empty text")
    console = Console(highlight=False)
    output = generate(
        target,
        drafter,
        prompt.to(target.device),
        streamer=None if options.json else CompletionStream(console, tokenizer, show_prompt=not options.chat),
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        **given(options, "prefill_chunk_size"),
        return_dict_in_generate=True,
        **sampling,
    )
    assert isinstance(output, SpecDecodeOutput)
    assert output.stats is not None
    tokens = output.sequences[0, prompt.shape[1] :].tolist()
    if options.json:
        print(json.dumps(_record(tokens, output.stats, tokenizer)))
        return 0
    place = f"{drafter.kind}, {target.device}, {str(target.dtype).removeprefix('torch.')}"
    console.print(f"\n{describe_run(len(tokens), output.stats)} ({place})", style="dim")
    return 0


def _record(tokens: list[int], stats: "AcceptanceStats", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """One generation for machines; `tau` is null when the first token ended the text."""
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "tau": stats.tau if stats.num_target_passes else None,
        "acceptance_at_depth": stats.acceptance_at_depth,
        "num_target_passes": stats.num_target_passes,
        "lossless": stats.lossless,
        "times_ms": stats.times_ms,
    }
