"""The papers' orders: every claim of `bench/claims/table.py` on one target, with paired intervals.

    python -m specdec.bench.papers --model tiny --prompts specdec/bundled/tiny/prompts.json --output FILE
    python -m specdec.bench.papers --model MODEL --drafters FOLDER --prompts question.jsonl --output FILE --update

A cell is an arm with one drafter. Cells that the file of --output has are not run again, unless the drafter has
changed; a run that was cut off goes on where it stopped. FOLDER holds drafters by the names in the table (`medusa`,
`hydra++`, ..., and the `short-` ones that `python -m specdec.bench.paper_runs` trains); the same name with `.seed1`,
`.seed2` is another training of it. Claims about drafters that are not there are "not run".

Greedy arms cost the drafter's passes alone, after one plain decoding of all prompts, which is kept beside the records.
Arms that sample decode for real: --num-sampled-prompts and --num-sampled-tokens say how much.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdec.bench.claims.arms import Arm, Bench, Counts, NotRunError, Sizes, figures
from specdec.bench.claims.cells import DrafterCells, as_record, counts_of, setup_of
from specdec.bench.claims.page import Measured, judge, page
from specdec.bench.claims.table import CLAIMS, Claim
from specdec.bundled.load import TINY_FOLDER
from specdec.commands.common.options import load_target
from specdec.common.files import replace_file
from specdec.evaluation.prompts import first_turns, read_questions
from specdec.evaluation.selection import evenly
from specdec.models.target.target import Target

__all__ = ["PAGE", "main", "measured_in", "page_of"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "papers.md"
_SECTIONS = {section.lower().replace(" ", "-"): section for section in CLAIMS}


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are due; returns the exit status."""
    options = _options(arguments)
    model, tokenizer = load_target(options.model, options)
    target = Target(model)
    questions = evenly(read_questions(options.prompts), options.num_prompts)
    prompts = first_turns(questions, tokenizer)
    claims = {section: CLAIMS[section] for section in options.only}
    arms = list(dict.fromkeys(arm for rows in claims.values() for claim in rows for arm in _arms(claim)))
    sizes, steps = _sizes(options), list(dict.fromkeys(arm.steps for arm in arms))
    setup = setup_of(options.model, model.dtype, options.prompts, prompts, sizes)
    cells = DrafterCells(options.output, options.drafters, setup, "papers")
    bench = Bench(target, prompts, target.stop_tokens, options.drafters, sizes, steps, cells.recording)
    papers = _Papers(bench, cells, steps)
    try:
        papers.run()
    finally:
        for section, rows in claims.items():
            print(f"\n{section}")
            for claim in rows:
                outcome = judge(claim, measured_in(papers.current))
                print(f"  {outcome.verdict:<15}{claim.text}: {outcome.ratio or outcome.note}")
    if options.update is not None:
        replace_file(options.update, page_of(papers.current))
    return 0


def measured_in(records: Sequence[Mapping[str, Any]]) -> Measured:
    """What records of one setup tell of an arm: counts, one entry per training seed that was run.

    The function raises NotRunError for an arm that they tell nothing of; the message says why.
    """

    def measured(arm: Arm) -> list[Counts]:
        ours = [one for one in records if one["arm"] == str(arm.steps) and _trained(one["drafter"]) == arm.drafter]
        found = [counts_of(one) for one in ours if "counts" in one]
        if not found:
            why = next((one["not_run"] for one in ours if "not_run" in one), "not there, or left out")
            raise NotRunError(f"{arm.drafter}: {why}")
        return [figures(arm, counts, ours[0]["setup"]["common_tree"]) for counts in found]

    return measured


def page_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The page of records of one setup, as a file has them: what was only begun says nothing."""
    records = [one for one in records if "cell" in one]
    commits = sorted({(one["provenance"]["git_sha"] or "unknown")[:12] for one in records})
    return page(CLAIMS, measured_in(records), _printed(records, commits) if records else {})


def _trained(source: str) -> str:
    """The drafter that a folder holds one training of."""
    return re.sub(r"\.seed\d+$", "", source)


class _Papers:
    """The cells of a run.

    Args:
        bench: measures them.
        cells: what is known of them.
        steps: the arms to be measured.
    """

    def __init__(self, bench: Bench, cells: DrafterCells, steps: Sequence[Arm]) -> None:
        self._bench = bench
        self._cells = cells
        self._due = [(arm, source) for arm in steps for source in bench.sources(arm)]

    def run(self) -> None:
        """Measure every cell that is due."""
        for number, (arm, source) in enumerate(self._due, start=1):
            record = self._cells.measure(str(arm), source, partial(self._measured, arm, source))
            if record is not None:
                told = f"not run: {record['not_run']}" if "not_run" in record else _told(counts_of(record))
                print(f"{number} of {len(self._due)}: {arm} ({source}): {told}, {record['seconds']:.0f} s", flush=True)

    @property
    def current(self) -> list[Mapping[str, Any]]:
        """The records of cells as they would be measured now: of these drafters, prompts and sizes."""
        found = (self._cells.find(str(arm), source) for arm, source in self._due)
        return [record for record in found if record is not None]

    def _measured(self, arm: Arm, source: str) -> dict[str, Any]:
        try:
            return as_record(self._bench, arm, source)
        except NotRunError as error:
            return {"not_run": str(error)}


def _told(counts: Counts) -> str:
    """The mean that counts stand for."""
    return f"{sum(pair[0] for pair in counts.values()) / sum(pair[1] for pair in counts.values()):.3f}"


def _arms(claim: Claim) -> tuple[Arm, Arm]:
    return claim.ours, claim.theirs


def _printed(records: Sequence[Mapping[str, Any]], commits: Sequence[str]) -> dict[str, str]:
    """The setup for the page."""
    setup = records[0]["setup"]
    sampled = setup["num_sampled_prompts"] or setup["num_prompts"]
    return {
        "Target": f"{setup['model']}, {setup['dtype']}",
        "Prompts": f"the first turns of {setup['prompts']}, {setup['num_prompts']} of them",
        "Greedy arms": f"{setup['num_new_tokens']} new tokens of every prompt",
        "Arms that sample": f"{setup['num_sampled_tokens']} new tokens of {sampled} prompts",
        "The common tree": f"{'x'.join(map(str, setup['common_tree']))}, unless an arm says otherwise",
        "Trainings": _trainings(records),
        "Commits": ", ".join(commits) or "none",
    }


def _trainings(records: Iterable[Mapping[str, Any]]) -> str:
    """How long drafters were trained."""
    names: dict[str, set[str]] = {}
    for one in records:
        if "trained" in one:
            told = f"{one['trained']['steps']:,} steps of {one['trained']['batch_size']} texts"
            name = _trained(one["drafter"])
            names.setdefault(told, set()).add("the `short-` ones" if name.startswith("short-") else name)
    return "; ".join(f"{told}: {', '.join(sorted(found))}" for told, found in sorted(names.items())) or "not told"


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(
        num_new_tokens=options.num_new_tokens,
        num_sampled_prompts=options.num_sampled_prompts,
        num_sampled_tokens=options.num_sampled_tokens,
        num_contexts=options.num_contexts,
        common_tree=tuple(options.tree),
        batch_size=options.batch_size,
        seed=options.seed,
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    default = Sizes()
    parser = argparse.ArgumentParser(prog="specdec.bench.papers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target: a folder, a hub id or a name that ships, such as tiny")
    parser.add_argument("--drafters", type=Path, help="folder of drafters by name (with tiny: the bundled ones)")
    parser.add_argument("--prompts", type=Path, required=True, help="questions: Spec-Bench's and MT-Bench's form, ...")
    parser.add_argument("--num-prompts", type=int, help="so many, spread evenly over the file (default: all)")
    parser.add_argument("--only", nargs="+", choices=tuple(_SECTIONS), default=list(_SECTIONS), help="sections")
    parser.add_argument("--output", type=Path, required=True, help="JSON-lines file of the cells")
    parser.add_argument("--update", type=Path, nargs="?", const=PAGE, help="write the page (default: docs/papers.md)")
    parser.add_argument("--tree", type=int, nargs="+", default=default.common_tree, help="k_config that arms share")
    parser.add_argument("--num-new-tokens", type=int, default=default.num_new_tokens)
    parser.add_argument("--num-sampled-prompts", type=int, help="of the arms that sample (default: all)")
    parser.add_argument("--num-sampled-tokens", type=int, default=default.num_sampled_tokens)
    parser.add_argument("--num-contexts", type=int, default=default.num_contexts, help="per prompt, for rates")
    parser.add_argument("--batch-size", type=int, default=default.batch_size)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    options = parser.parse_args(arguments)
    options.only = [_SECTIONS[name] for name in options.only]
    if options.drafters is None:
        if options.model != "tiny":
            parser.error("--drafters: expected a folder of drafters, got none")
        options.drafters = TINY_FOLDER
    if not options.drafters.is_dir():
        parser.error(f"--drafters: expected a folder, got {options.drafters}")
    counts = ("num_new_tokens", "num_sampled_tokens", "num_contexts", "batch_size")
    bad = [name for name in counts if getattr(options, name) < 1]
    if bad or options.num_sampled_tokens > options.num_new_tokens:
        parser.error(
            "expected --num-new-tokens, --num-sampled-tokens, --num-contexts and --batch-size of 1 or more, and no "
            "more sampled tokens than new ones"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
