"""`specdec data`: what drafters would learn from a file or data set, without loading a model."""

import argparse
from typing import TYPE_CHECKING

from specdec.commands.common.options import (
    add_chat_template,
    chat_template_of,
    check_positive,
    hide_progress_of_loading,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

    from specdec.commands.common.options import Commands
    from specdec.training.data.left_out import Reading
    from specdec.training.data.samples import Sample

__all__ = ["add_to"]

_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_LEARNT = "bold green"
_BRACKETS = ("⟦", "⟧")  # around what is learnt, where there are no colours


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("data", help="show what drafters would learn from a file or data set")
    tokenizer = "of the target, whose weights are not loaded: a folder, a hub id, 'tiny' or 'smollm2'"
    longest = "tokens at which texts are cut off (default: 2048, or the target's context where that is less)"
    parser.add_argument("data", help="file or data set, as for train")
    parser.add_argument("--target", "--tokenizer", required=True, metavar="TARGET", help=f"the tokenizer {tokenizer}")
    add_chat_template(parser)
    parser.add_argument("--max-length", type=int, help=longest)
    parser.add_argument("--num-examples", type=int, default=1, help="texts to show (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from transformers import AutoConfig, AutoTokenizer

    from specdec.bundled.load import source_of
    from specdec.training.data.left_out import LeftOut
    from specdec.training.data.reading import MAX_LENGTH, read_texts

    if options.max_length is not None:
        check_positive(options, "max_length")
    hide_progress_of_loading()
    source = source_of(options.target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    try:
        config = AutoConfig.from_pretrained(source)
        vocab_size, context = config.vocab_size, config.max_position_embeddings
    except (OSError, ValueError, AttributeError):  # a folder of a tokenizer alone
        vocab_size, context = len(tokenizer), MAX_LENGTH
    longest = options.max_length or min(MAX_LENGTH, context)
    template = chat_template_of(options)
    reading = read_texts(options.data, tokenizer, max_length=longest, vocab_size=vocab_size, chat_template=template)
    console = Console(highlight=False)
    if not reading.samples:
        LeftOut(options.data, reading.left_out).report("usable text", reading.num_rows)
    console.print(_counts(reading, longest))
    if reading.left_out:
        console.print(_left_out(reading))
    for number in range(min(options.num_examples, len(reading.samples))):
        _show(console, reading.samples[number], tokenizer, number)
    return 0


def _counts(reading: "Reading", longest: int) -> "Table":
    """Texts, tokens and answers in figures."""
    import torch
    from rich.table import Table

    lengths = torch.tensor([sample.tokens.shape[0] for sample in reading.samples], dtype=torch.float64)
    learnt = torch.tensor([int(sample.loss_mask.sum()) for sample in reading.samples], dtype=torch.float64)
    table = Table(show_header=False, box=None)
    cut_off = f"{reading.num_cut:,} cut off at {longest:,} tokens"
    table.add_row("texts", f"{len(lengths):,} of {reading.num_rows:,}; {cut_off}")
    table.add_row("tokens", f"{int(lengths.sum()):,}, of which {learnt.sum() / lengths.sum():.0%} are learnt")
    for name, values in (("length", lengths), ("learnt", learnt)):
        figures = values.quantile(torch.tensor(_QUANTILES, dtype=torch.float64)).tolist()
        named = zip(("shortest", "10 %", "median", "90 %", "longest"), figures, strict=True)
        table.add_row(f"{name} per text", ", ".join(f"{part} {figure:,.0f}" for part, figure in named))
    if reading.num_answers:
        hidden = f"; {reading.num_hidden:,} not learnt, as the chat template rewrites or drops them"
        table.add_row("answers", f"{reading.num_answers:,}{hidden if reading.num_hidden else ''}")
    return table


def _left_out(reading: "Reading") -> "Table":
    """What is left out, why, and where the first of each kind stands."""
    from rich.table import Table
    from rich.text import Text

    table = Table("left out", "texts ...", "the first", box=None, title_justify="left")
    for reason in sorted(reading.left_out, key=lambda reason: -reason.count):
        first = f"{reason.place}{reason.detail and ': '}{reason.detail}"
        table.add_row(f"{reason.count:,}", Text(reason.text), Text(first))
    return table


def _show(console: "Console", sample: "Sample", tokenizer: "PreTrainedTokenizerBase", number: int) -> None:
    """One text, with what is learnt of it in colour, or in brackets where there are no colours."""
    from rich.text import Text

    marks = ("", "") if console.color_system else _BRACKETS
    how = f"[{_LEARNT}]in colour[/]" if console.color_system else f"in {''.join(_BRACKETS)}"
    console.print(f"\ntext {number + 1}, what is learnt {how}:")
    text = Text()
    for part, is_learnt in _parts(sample, tokenizer):
        text.append(f"{marks[0]}{part}{marks[1]}" if is_learnt else part, style=_LEARNT if is_learnt else "dim")
    console.print(text, soft_wrap=True)


def _parts(sample: "Sample", tokenizer: "PreTrainedTokenizerBase") -> "list[tuple[str, bool]]":
    """A text in parts that are learnt and parts that are not."""
    mask = sample.loss_mask.tolist()
    starts = [place for place in range(len(mask)) if place == 0 or mask[place] != mask[place - 1]]
    ends = [*starts[1:], len(mask)]
    return [(str(tokenizer.decode(sample.tokens[s:e])), mask[s]) for s, e in zip(starts, ends, strict=True)]
