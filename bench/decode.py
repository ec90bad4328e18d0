"""Decoding speed of every bundled drafter beside plain decoding and transformers' own generate, in one run.

Questions: does our runtime cost anything over `model.generate` (row "none" against "transformers")? How much of tau
becomes speed (efficiency = speedup / tau)?
Run: `python -m specdec.bench.decode` (`--output FILE` appends the record, with provenance, to a JSON-lines file).
All rows decode the same prompts one at a time; one counter counts all tokens; no number is printed if a text differs.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from specdec.bench.provenance import append_record
from specdec.comparison import compare, comparison_table
from specdec.models.target import Target
from specdec.tiny import TINY_FOLDER, load_tiny, load_tiny_drafters

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status, 1 if any text differs from plain decoding."""
    parser = argparse.ArgumentParser(prog="specdec.bench.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON-lines file that the record is appended to")
    options = parser.parse_args(arguments)

    model, tokenizer = load_tiny(device=options.device)
    target = Target(model)
    texts = json.loads((TINY_FOLDER / "prompts.json").read_text())
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    drafters = load_tiny_drafters(target)

    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=(len(drafters) + 1) * (options.repeats + 1))
        rows = compare(
            target,
            drafters,
            prompts,
            max_new_tokens=options.max_new_tokens,
            stop_tokens=(tokenizer.eos_token_id,),
            repeats=options.repeats,
            on_progress=lambda _: progress.advance(task),
        )
    if not all(row.identical for row in rows):
        print("texts differ; no time is reported:", [row.name for row in rows if not row.identical], file=sys.stderr)
        return 1
    console.print(comparison_table(rows, f"bundled model, batch 1, greedy, {options.device}"))
    by_name = {row.name: row for row in rows}
    print(f"plain decoding over transformers generate: {1 / by_name['transformers'].speedup:.2f}")
    for row in rows:
        if row.tau > 1:
            print(f"efficiency (speedup / tau) of {row.name}: {row.speedup / row.tau:.2f}")
    if options.output is not None:
        append_record(options.output, {"bench": "decode", "rows": [row.record() for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
