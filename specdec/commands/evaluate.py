"""`specdec eval`: which drafter is fastest for this model on these prompts, with evidence."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.common.options import add_place, as_tree_option, bundled, load_target

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.commands.common.options import Commands
    from specdec.drafting.base import Drafter
    from specdec.evaluation.figures import ArmFigures
    from specdec.evaluation.prompts import QuestionSet
    from specdec.evaluation.records import Results
    from specdec.evaluation.run import Progress
    from specdec.models.target.target import Target

__all__ = ["add_to", "figures_table", "showing_progress"]

_SECONDS_BETWEEN_LINES = 10.0


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("eval", help="compare drafters, plain decoding and transformers on your prompts")
    sources = (
        "kinds without weights, folders, hub ids, or with --model tiny or smollm2 bundled ones; SOURCE@TREE gives one "
        "another tree, as --tree of generate (eagle@auto: sized at every step), A+B makes one of two, and NAME=SOURCE "
        "gives another name"
    )
    prompts = "files, spec_bench, mt_bench, humaneval, gsm8k, speed_bench, bundled, or data sets of the hub"
    count = "this many of them, spread over their categories (default: all)"
    temperature = "0 is greedy decoding; several are measured side by side (default: 0)"
    traces = "prompts whose answers are shown step by step, or all (default: %(default)s)"
    minutes = "time after which no further prompt begins; the reports tell of those that were measured"
    place = "folder for records.jsonl, traces.jsonl, summary.md and report.html"
    models = "target: a folder, a hub id, 'tiny', the bundled model, or 'smollm2', a chat model that is fetched once"
    parser.add_argument("--model", required=True, help=models)
    parser.add_argument("--drafters", nargs="+", default=["prompt_lookup"], metavar="DRAFTER", help=sources)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="PROMPTS", help=prompts)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help=place)
    parser.add_argument("--num-prompts", type=int, metavar="N", help=count)
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], metavar="T", help=temperature)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="of sampling (default: 0)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts that are decoded together (default: 1)")
    parser.add_argument("--repeats", type=int, default=1, help="times that an answer is timed; the median counts")
    parser.add_argument("--without-transformers", action="store_true", help="measure this library alone")
    parser.add_argument("--traces", type=_count_or_all, default=4, metavar="N", help=traces)
    parser.add_argument("--minutes", type=float, help=minutes)
    parser.add_argument("--resume", action="store_true", help="go on with what the folder of --output has")
    add_place(parser, ("float32", "float16", "bfloat16"))
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from specdec.evaluation.prompt_sets import all_questions, find_questions
    from specdec.evaluation.report import check_installed, write_report
    from specdec.evaluation.run import Plan, check_folder, evaluate
    from specdec.evaluation.selection import stratified
    from specdec.models.target.target import Target

    check_installed()
    check_folder(options.output, resume=options.resume)
    plan = Plan(
        max_new_tokens=options.max_new_tokens,
        temperatures=tuple(options.temperature),
        seeds=tuple(options.seeds),
        batch_size=options.batch_size,
        repeats=options.repeats,
        with_transformers=not options.without_transformers,
        num_traces=options.traces,
        minutes=options.minutes,
    )
    sources = _named(options.drafters)
    sets = [find_questions(prompts) for prompts in options.prompts]
    questions = stratified(all_questions(sets), options.num_prompts, seed=0)
    model, tokenizer = load_target(options.model, options)
    target = Target(model)
    drafters = _loaded(target, options.model, sources)
    settings = {
        "model": options.model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "drafters": {name: Path(source).name for name, source in sources.items()},
        "prompts": [{"name": Path(one.name).name, "sha256": one.sha256, "left_out": _counts(one)} for one in sets],
        "num_prompts": options.num_prompts,
    }
    try:
        with showing_progress() as show:
            results, is_whole = evaluate(
                target,
                drafters,
                questions,
                tokenizer,
                options.output,
                plan,
                settings=settings,
                resume=options.resume,
                on_progress=show,
            )
    except KeyboardInterrupt:
        _tell(write_report, options.output)
        raise
    _tell(write_report, options.output)
    if not is_whole:
        print("specdec: the time is over; --resume goes on", file=sys.stderr)
    return _status(results)


def _tell(write_report: "Callable[[Results, Path], None]", folder: Path) -> None:
    """Write the reports of what there is, and show the figures."""
    from rich.console import Console

    from specdec.evaluation.figures import figures
    from specdec.evaluation.records import read_results

    if not (folder / "records.jsonl").exists():
        return
    results = read_results(folder)
    console = Console()
    for temperature in results.temperatures:
        if rows := figures(results, temperature):
            console.print(figures_table(rows, f"temperature {temperature:g}, {rows[0].num_answers} answers"))
    for arm, reason in results.missing.items():
        print(f"specdec: {arm} is missing: {reason}", file=sys.stderr)
    write_report(results, folder)
    console.print(f"{folder / 'report.html'}", soft_wrap=True, highlight=False)


def _status(results: "Results") -> int:
    """1 if an arm is missing or a text of ours is not that of plain decoding, rounding apart."""
    from specdec.evaluation.checking import Divergence

    ours = {arm.name for arm in results.about.arms if arm.library == "specdec"}
    is_wrong = any(
        Divergence(**answer.divergence).is_error
        for answer in results.answers.values()
        if answer.divergence is not None and answer.arm in ours
    )
    return 1 if results.missing or is_wrong else 0


def figures_table(rows: "Sequence[ArmFigures]", title: str) -> "Table":
    """The figures of all arms as a table of one line each, for a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True, overflow="ellipsis")  # gives way where the terminal is narrow
    for heading, width in (("tok/s", 5), ("speedup", 7), ("95 %", 9), ("tau", 4), ("slower", 6), ("text", 9)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        has_bounds = row.speedup.low == row.speedup.low and row.speedup.low < row.speedup.high
        text = "sampled"
        if row.num_identical is not None:
            text = "identical" if not row.divergences else f"{len(row.divergences)} differ"
        table.add_row(
            row.arm.name,
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup.value:.2f}x",
            f"{row.speedup.low:.2f}-{row.speedup.high:.2f}" if has_bounds else "",
            f"{row.tau.value:.2f}" if row.tau else "-",
            f"{row.share_slower:.0%}",
            text,
        )
    return table


@contextmanager
def showing_progress() -> "Iterator[Callable[[Progress], None]]":
    """Yields what takes the progress of an evaluation: a bar on a terminal, plain lines on standard error otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("evaluating"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    began, first, last = time.monotonic(), -1, float("-inf")
    text = TextColumn("{task.description}")
    with Bars(*columns, text, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("")

        def show(progress: "Progress") -> None:
            nonlocal first, last
            first = progress.num_done if first < 0 else first
            bars.update(task, completed=progress.num_done, total=progress.num_all, description=progress.doing)
            now = time.monotonic()
            if console.is_terminal or now - last < _SECONDS_BETWEEN_LINES:
                return
            last = now
            done = progress.num_done - first
            to_do = progress.num_all - progress.num_done
            left = f", {timedelta(seconds=round((now - began) / done * to_do))} left" if done else ""
            line = f"{progress.num_done:,} of {progress.num_all:,} answers{left}: {progress.doing}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)

        yield show


def _named(drafters: Sequence[str]) -> dict[str, str]:
    """Sources of the drafters by name: `NAME=SOURCE`, or a source that goes by its last part.

    Raises:
        ValueError: two of one name.
    """
    named: dict[str, str] = {}
    for text in drafters:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = text.rstrip("/").rpartition("/")[2], text
        if name in named:
            raise ValueError(f"--drafters: expected different names, got {name} twice; NAME=SOURCE gives another")
        if name != "none":  # is always there
            named[name] = source
    return named


def _counts(one: "QuestionSet") -> list[str]:
    """What of a set cannot be asked, in words."""
    return [str(reason) for reason in one.left_out]


def _loaded(target: "Target", model: str, sources: Mapping[str, str]) -> "dict[str, Drafter | str]":
    """The drafters; one that does not fit is why it is missing, and the others are measured all the same."""
    from specdec.tuning.auto import load_drafter

    found: dict[str, Drafter | str] = {}
    for name, text in sources.items():
        source, _, tree = text.partition("@")
        try:
            found[name] = drafter = load_drafter(bundled(model, source), target, tree=as_tree_option(tree or None))
            drafter.bind(target)
        except (TypeError, ValueError, OSError, NotImplementedError, RuntimeError) as error:
            found[name] = str(error).splitlines()[0]
            print(f"specdec: {name} is not measured: {found[name]}", file=sys.stderr)
    return found


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)
