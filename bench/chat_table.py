"""What the chat model's drafters accept on real prompts, and whether their texts are those of plain decoding.

    python -m specdec.bench.chat_table --drafters FOLDER --prompts question.jsonl --output RECORDS
    python -m specdec.bench.chat_table --table RECORDS

The first command measures prompt lookup and every drafter in FOLDER, each with the tree it was saved with, but for the
short runs of `specdec.bench.paper_runs`: acceptance length at T = 0 (on a recording of plain decoding) and at T = 1
(decoded; by rejection, and without a law by the naive rule), and the texts at T = 0, decoded with a small tree, against
plain ones. It goes on where it stopped. The second prints the table in docs/drafters/README.md.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec.bench.claims.arms import Arm, Bench, Sizes
from specdec.bench.claims.cells import DrafterCells, as_record, counts_of, setup_of
from specdec.bench.claims.runs import SHORT_RUNS
from specdec.bench.common.journal import ended
from specdec.bench.common.tables import table
from specdec.commands.common.options import load_target
from specdec.common.provenance import read_records
from specdec.drafting.base import Drafter
from specdec.evaluation.checking import Divergence, first_divergence
from specdec.evaluation.intervals import Interval, mean_interval
from specdec.evaluation.prompts import first_turns, read_questions
from specdec.evaluation.replay import Recording
from specdec.evaluation.selection import evenly
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Naive, Rejection
from specdec.models.target.target import Target

__all__ = ["chat_table", "differing_texts", "main"]

_WITHOUT_WEIGHTS = "prompt_lookup"


def main(arguments: list[str] | None = None) -> int:
    """Measure what is due, or print the table; returns the exit status."""
    options = _options(arguments)
    if options.table is not None:
        print(chat_table(options.table), end="")
        return 0
    model, tokenizer = load_target(options.model, options)
    target = Target(model)
    prompts = first_turns(evenly(read_questions(options.prompts), options.num_prompts), tokenizer)
    sizes = Sizes(
        num_new_tokens=options.num_new_tokens,
        num_sampled_prompts=options.num_sampled_prompts,
        num_sampled_tokens=options.num_sampled_tokens,
        common_tree=tuple(options.checked_tree),
        batch_size=options.batch_size,
    )
    setup = setup_of(options.model, model.dtype, options.prompts, prompts, sizes)
    setup["num_checked_tokens"] = options.num_checked_tokens
    trained = sorted(path.parent.name for path in options.drafters.glob("*/training.json"))
    names = [_WITHOUT_WEIGHTS, *(name for name in trained if name.split(".seed")[0] not in SHORT_RUNS)]
    rules = {name: Naive() if name == _WITHOUT_WEIGHTS else Rejection() for name in names}
    arms = [arm for name, rule in rules.items() for arm in (Arm(name, None), Arm(name, None, rule, 1.0))]
    cells = DrafterCells(options.output, options.drafters, setup, "chat_table")
    bench = Bench(target, prompts, target.stop_tokens, options.drafters, sizes, arms, cells.recording)
    for arm in arms:
        record = cells.measure(str(arm), arm.drafter, partial(_measured, bench, arm))
        if record is not None:
            print(f"{arm}: {_printed(record)}, {record['seconds']:.0f} s", flush=True)
    for name in names:
        record = cells.measure("texts", name, partial(_compared, bench, name, options.num_checked_tokens))
        if record is not None:
            print(f"{name}: {record['num_identical']} of {len(prompts)} texts as plain", flush=True)
    print(chat_table(options.output), end="")
    return 0


def chat_table(records: Path) -> str:
    """Markdown: a row per drafter, in the order of their acceptance length at T = 0.

    Args:
        records: JSON lines.
    """
    arms: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in ended(read_records(records)):
        if "figure" in one:
            arms.setdefault(one["drafter"], {})[one["figure"]] = one
    rows = []
    for name, found in sorted(arms.items(), key=lambda pair: _interval(pair[1].get("T = 0")).value):
        greedy, texts = found.get("T = 0", {}), found.get("texts")
        rows.append(
            {
                "drafter": f"`{name}`",
                "parameters": f"{greedy['trained']['num_parameters'] / 1e6:.1f} M" if "trained" in greedy else "-",
                "tree": str(greedy.get("num_nodes", "-")),
                "tau, T = 0": _printed(found.get("T = 0")),
                "tau, T = 1": _printed(found.get("T = 1")),
                "texts as plain": "-"
                if texts is None
                else f"{texts['num_identical']} of {texts['setup']['num_prompts']}",
            }
        )
    return table(rows)


def differing_texts(
    target: Target, drafter: Drafter, recording: Recording, num_tokens: int, batch_size: int
) -> list[Divergence]:
    """Decode the recorded prompts greedily, in batches, and compare the texts with those of plain decoding.

    Args:
        target: what was recorded.
        drafter: loaded for it.
        recording: of plain decoding.
        num_tokens: new tokens of each text that are compared.
        batch_size: prompts at a time.
    """
    decoder, found = Decoder(target, drafter), []
    for first in range(0, len(recording.texts), batch_size):
        texts = recording.texts[first : first + batch_size]
        prompts = [text.prompt for text in texts]
        got = decoder.decode(prompts, num_tokens, stop_tokens=recording.stop_tokens).tokens
        for index, (text, tokens) in enumerate(zip(texts, got, strict=True), start=first):
            found.append(first_divergence(target, text.prompt, text.new[:num_tokens].tolist(), tokens, index=index))
    return [one for one in found if one is not None]


def _measured(bench: Bench, arm: Arm) -> dict[str, Any]:
    """The counts of an arm, and the nodes of its tree, the root counted."""
    nodes = bench.drafter(arm, arm.drafter).shape.num_nodes
    return {"figure": f"T = {arm.temperature:g}", "num_nodes": nodes, **as_record(bench, arm, arm.drafter)}


def _compared(bench: Bench, name: str, num_tokens: int) -> dict[str, Any]:
    """How many texts, decoded with the small tree, are those of plain decoding."""
    recording = bench.recorded.recording
    drafter = bench.drafter(Arm(name), name)
    different = differing_texts(bench.target, drafter, recording, num_tokens, bench.sizes.batch_size)
    identical = len(recording.texts) - len(different)
    return {"figure": "texts", "num_identical": identical, "different": [str(one) for one in different]}


def _interval(record: Mapping[str, Any] | None) -> Interval:
    """The acceptance length of a record with its interval over prompts; 0 for none."""
    if record is None:
        return Interval(0.0, 0.0, 0.0)
    return mean_interval(torch.tensor([list(counts_of(record).values())], dtype=torch.float64))


def _printed(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    found = _interval(record)
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = Sizes()
    parser = argparse.ArgumentParser(prog="specdec.bench.chat_table", description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, metavar="RECORDS", help="print the table of these records, and stop")
    parser.add_argument("--model", default="smollm2", help="target (default: %(default)s)")
    parser.add_argument("--drafters", type=Path, help="folder of drafters")
    parser.add_argument("--prompts", type=Path, help="questions: MT-Bench's form, Spec-Bench's, ...")
    parser.add_argument("--num-prompts", type=int, help="so many, spread evenly over the file (default: all)")
    parser.add_argument("--output", type=Path, help="JSON-lines file of the records")
    parser.add_argument("--num-new-tokens", type=int, default=default.num_new_tokens, help="T = 0: %(default)s")
    parser.add_argument("--num-sampled-prompts", type=int, default=40, help="T = 1: %(default)s")
    parser.add_argument("--num-sampled-tokens", type=int, default=default.num_sampled_tokens, help="%(default)s")
    parser.add_argument("--num-checked-tokens", type=int, default=64, help="of texts compared: %(default)s")
    parser.add_argument("--checked-tree", type=int, nargs="+", default=(2, 1, 1, 1), help="k_config: %(default)s")
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="%(default)s")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    options = parser.parse_args(arguments)
    if options.table is None and None in (options.drafters, options.prompts, options.output):
        parser.error("expected --drafters, --prompts and --output, or --table")
    return options


if __name__ == "__main__":
    sys.exit(main())
