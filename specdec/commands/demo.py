"""`specdec demo`: the bundled model completes Python, with every bundled drafter, in front of your eyes."""

import argparse
import json
from typing import TYPE_CHECKING

from specdec.commands.options import check_positive, hide_progress_of_loading

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.commands.options import Commands

__all__ = ["add_to", "run_demo"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="the bundled model with every bundled drafter: text, then a table")
    repeats = "timed repeats; medians are shown (default: %(default)s)"
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new tokens per prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help=repeats)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    hide_progress_of_loading()
    check_positive(options, "max_new_tokens", "repeats")
    return 0 if run_demo(max_new_tokens=options.max_new_tokens, repeats=options.repeats, as_json=options.json) else 1


def run_demo(
    *, max_new_tokens: int = 128, repeats: int = 3, as_json: bool = False, console: "Console | None" = None
) -> bool:
    """Show one completion, then compare all bundled drafters on the bundled prompts.

    Args:
        max_new_tokens: new tokens per prompt.
        repeats: timed repeats; the table shows medians.
        as_json: print the rows as JSON instead of texts and table.
        console: where to print.

    Returns:
        Whether every drafter gave the text of plain decoding.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from specdec.bundled.load import TINY_FOLDER, bundled_drafters, load_tiny, tiny_drafter
    from specdec.commands.text import ACCEPTED_STYLE, CompletionStream
    from specdec.drafters.load import load_drafter
    from specdec.evaluation.comparison import compare, comparison_table
    from specdec.generation.generate import generate
    from specdec.models.target.target import Target

    console = Console() if console is None else console
    model, tokenizer = load_tiny()
    target = Target(model)
    texts = json.loads((TINY_FOLDER / "prompts.json").read_text())
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    bundled = {name: str(tiny_drafter(name)) for name in bundled_drafters()}
    sources = {name: name for name in ("none", "prompt_lookup", "lookahead")} | bundled
    drafters = {name: load_drafter(source, target) for name, source in sources.items()}
    stop = tokenizer.eos_token_id

    if not as_json:
        console.print(
            Text.assemble("Medusa on the bundled model; ", ("accepted draft tokens", ACCEPTED_STYLE), " in colour\n")
        )
        stream = CompletionStream(console, tokenizer, show_prompt=True)
        generate(
            target,
            drafters["medusa"],
            prompts[1][None],
            streamer=stream,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=stop,
        )
        console.print()
    with Progress(console=console, transient=True, disable=as_json) as progress:
        task = progress.add_task("comparing drafters", total=(len(drafters) + 1) * (repeats + 1))
        rows = compare(
            target,
            drafters,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_tokens=(stop,),
            repeats=repeats,
            on_progress=lambda _: progress.advance(task),
        )
    if as_json:
        console.print_json(json.dumps([row.record() for row in rows], allow_nan=False))
    else:
        place = f"{target.device}, {torch.get_num_threads()} threads"
        title = f"{len(prompts)} prompts, up to {max_new_tokens} new tokens each, greedy, {place}"
        console.print(comparison_table(rows, title))
    return all(row.identical for row in rows)
