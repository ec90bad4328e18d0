"""`specdec demo`: the bundled model completes Python, with every bundled drafter, in front of your eyes."""

import json
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdec.checkpoints import load_drafter
from specdec.comparison import compare, comparison_table
from specdec.decoder import Decoder, StepReport
from specdec.drafters.base import Drafter
from specdec.models.target import Target
from specdec.text import TextPieces
from specdec.tiny import TINY_FOLDER, load_tiny, tiny_drafter

__all__ = ["run_demo", "stream_completion"]

_ACCEPTED = "bold green"


def stream_completion(
    console: Console,
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...] = (),
) -> Any:
    """Print a completion as it is made, accepted draft tokens in colour; returns the `DecodeResult`."""
    ids = prompt.tolist()
    console.print(Text(tokenizer.decode(ids, skip_special_tokens=True), style="dim"), end="", soft_wrap=True)
    pieces = TextPieces(tokenizer, ids)

    def show(report: StepReport) -> None:
        for index, token in enumerate(report.new[0]):
            style = _ACCEPTED if index < len(report.new[0]) - 1 else ""
            console.print(Text(pieces.add(token), style=style), end="", soft_wrap=True)

    result = decoder.decode([prompt], max_new_tokens, stop_tokens=stop_tokens, on_step=show)
    console.print(pieces.rest(), markup=False)
    return result


def run_demo(
    *, max_new_tokens: int = 128, repeats: int = 3, as_json: bool = False, console: Console | None = None
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
    console = Console() if console is None else console
    model, tokenizer = load_tiny()
    target = Target(model)
    texts = json.loads((TINY_FOLDER / "prompts.json").read_text())
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    drafters: dict[str, Drafter | None] = {"none": None, "prompt_lookup": load_drafter("prompt_lookup", target)}
    for kind in ("medusa", "draft_model"):
        drafters[kind] = load_drafter(tiny_drafter(kind), target)
    stops = (tokenizer.eos_token_id,)

    if not as_json:
        console.print(
            Text.assemble("Medusa on the bundled model; ", ("accepted draft tokens", _ACCEPTED), " in colour\n")
        )
        stream_completion(
            console, Decoder(target, drafters["medusa"]), tokenizer, prompts[1],
            max_new_tokens=max_new_tokens, stop_tokens=stops,
        )  # fmt: skip
        console.print()
    with Progress(console=console, transient=True, disable=as_json) as progress:
        task = progress.add_task("comparing drafters", total=(len(drafters) + 1) * (repeats + 1))
        rows = compare(
            target,
            drafters,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_tokens=stops,
            repeats=repeats,
            on_progress=lambda _: progress.advance(task),
        )
    if as_json:
        console.print_json(json.dumps([row.record() for row in rows]))
    else:
        place = f"{target.device}, {torch.get_num_threads()} threads"
        title = f"{len(prompts)} prompts, up to {max_new_tokens} new tokens each, greedy, {place}"
        console.print(comparison_table(rows, title))
    return all(row.identical for row in rows)
