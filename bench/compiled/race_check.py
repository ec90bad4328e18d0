"""Small calls of the kernels in which threads or programs hand each other data, for a race detector to watch.

Question: does any of them read what another may not have written yet?

    compute-sanitizer --tool racecheck --error-exitcode 1 python -m specdec.bench.compiled.race_check --output x.jsonl

Memcheck and synccheck watch the same calls. Racecheck watches shared memory. For what programs hand each other through
device memory there is only the result, which is compared with the definition, on poisoned memory. Without a GPU eager
PyTorch stands in for the kernels, which shows that the calls are right.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec.bench.common.harness import BenchOp
from specdec.bench.common.journal import AGAIN, Journal, last_lines
from specdec.bench.common.machine import device_is_lost
from specdec.bench.common.shapes import TINY, StepShape, TreeSize

__all__ = ["OPS", "main"]

# by the names of their benchmarks
OPS = (
    *("tree_attention", "skinny_linear", "draft_heads", "lm_head_topk"),  # the last to arrive merges
    # changed in place, or read after being stored
    *("kv_compact", "commit_pairs", "emit_step", "rope_kv_write", "tree_grow", "tree_rerank", "sample_probs"),
    *("tree_merge", "learn_chances"),
    *("accept_rejection", "accept_typical"),  # loads through shared memory ahead of their use, and gathers there
)

# keys, columns and vocabulary enough to be split, and few enough for a detector that slows the GPU down a hundredfold
_MODEL = replace(TINY, name="tiny-wide", hidden_size=1024, intermediate_size=1024, vocab_size=8192)
_SHAPE = StepShape(_MODEL, batch=2, tree=TreeSize(16, 3), context=600, dtype=torch.float16)


def main(arguments: list[str] | None = None) -> int:
    """Call every kernel on the list once and check its result; returns the exit status, 1 if one was wrong."""
    parser = argparse.ArgumentParser(prog="specdec.bench.compiled.race_check", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON-lines file that the results are appended to")
    parser.add_argument("--resume", action="store_true", help="only what the file does not have yet")
    options = parser.parse_args(arguments)
    provider = "triton" if torch.cuda.is_available() else "reference"
    journal, num_failed = Journal(options.output, resume=options.resume), 0
    for name in journal.due(OPS):
        journal.begin(name)
        try:
            for op in _ops(vars(importlib.import_module(f"specdec.bench.kernels.bench_{name}"))):
                op.check(provider, _SHAPE)
                print(f"{op.name}/{provider}: right", flush=True)
            failure = {}
        except Exception:  # the others are still worth a look
            traceback.print_exc()
            failure, num_failed = {"failure": last_lines(traceback.format_exc())}, num_failed + 1
        journal.end(name, {"bench": "hand_over", "op": name, "provider": provider, **failure}, failed=bool(failure))
        if failure and device_is_lost():
            return AGAIN
    return int(num_failed > 0)


def _ops(module: Mapping[str, Any]) -> list[BenchOp]:
    """The ops of a benchmark file, which may hold several in a dictionary."""
    values = [value for name in module for value in (module[name].values() if name == "OPS" else [module[name]])]
    return [value for value in values if isinstance(value, BenchOp)]


if __name__ == "__main__":
    sys.exit(main())
