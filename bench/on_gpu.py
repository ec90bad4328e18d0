"""All measurements that need a GPU, in calls of some minutes that go on where the last one ended.

    python -m specdec.bench.on_gpu --output results             # nine minutes, the most telling first; then again
    python -m specdec.bench.on_gpu --output results --only decode_7b --fresh
    python -m specdec.bench.on_gpu --output rehearsal --dry     # three short calls on the CPU, one of them killed

The stages are in `bench/campaign/stages.py`. Each runs in processes of its own with a time limit and logs, and none
stops another. Every call ends in one archive, OUTPUT/<number>.tar.gz, of at most 16 MB: records.jsonl, summary.md,
logs, pictures, and what the next call needs, also on another machine that has nothing but the archive. It is written
after every stage and every half minute, so that a call which is killed has left one; the next call writes it once more.

The exit status is 1 if a command failed in this call. What was cut off or not begun is no failure; the summary lists
it, and the next call goes on with it. What failed is tried once more.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch

from specdec.bench.campaign.call import Call
from specdec.bench.campaign.rehearsal import rehearse
from specdec.bench.common.pictures import NEEDS, can_draw
from specdec.bench.launches import CONTEXT, read_table

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Make one call; returns its exit status."""
    options, parser = _options(arguments)
    if options.dry:
        return rehearse(options.output)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # or provenance would name a GPU that nothing ran on
    elif not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU, found none; --dry rehearses everything on the CPU")
    else:
        os.environ.pop("TRITON_INTERPRET", None)  # as everything that runs inherits it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # unwinds, which ends the stage that runs
    output = options.output.resolve()
    counts = {
        (model.lower(), drafter, str(CONTEXT)): (row.num_launches, row.estimate_ms)
        for model, rows in read_table().items()
        for drafter, row in rows.items()
    }
    call = Call(output, (options.archives or output).resolve(), on_cpu=options.cpu, counts=counts)
    known = [stage.name for stage in call.stages]
    if unknown := {*options.only} - {*known}:
        parser.error(f"--only: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if options.fresh:
        call.forget(options.only or known)
    if not can_draw():
        print(f"no timelines: {NEEDS}", file=sys.stderr)
    status = call.run(options.only or known, 60 * options.minutes)
    print((output / "summary.md").read_text(encoding="utf-8"))
    return status


def _options(arguments: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(prog="specdec.bench.on_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="time for this call (default: 9)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="default: build/gpu")
    parser.add_argument("--archives", type=Path, help="folder of the archives (default: OUTPUT)")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these stages alone")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls found in the stages that run")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, where nothing of interest is timed")
    parser.add_argument("--dry", action="store_true", help="rehearse: three short calls on the CPU, one of them killed")
    return parser.parse_args(arguments), parser


if __name__ == "__main__":
    sys.exit(main())
