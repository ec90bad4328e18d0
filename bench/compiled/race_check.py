"""Small calls of the kernels in which threads or programs hand each other data, for a race detector to watch.

Question: does any of them read what another may not have written yet?

    compute-sanitizer --tool racecheck --error-exitcode 1 python -m specdec.bench.compiled.race_check

Racecheck watches shared memory. For what programs hand each other through device memory there is only the result, which
is compared with the definition, on poisoned memory. Without a GPU eager PyTorch stands in for the kernels, which shows
that the calls are right.
"""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specdec.bench.common.harness import BenchOp
from specdec.bench.common.shapes import TINY, StepShape, TreeSize

__all__ = ["OPS", "main"]

# by the names of their benchmarks
OPS = (
    *("tree_attention", "skinny_linear", "draft_heads", "lm_head_topk"),  # the last to arrive merges
    *("kv_compact", "rope_kv_write", "tree_rerank", "sample_probs"),  # changed in place, or read after being stored
    *("accept_rejection", "accept_typical"),  # loads through shared memory ahead of their use, and gathers there
)

# keys, columns and vocabulary enough to be split, and few enough for a detector that slows the GPU down a hundredfold
_MODEL = replace(TINY, name="tiny-wide", hidden_size=1024, intermediate_size=1024, vocab_size=8192)
_SHAPE = StepShape(_MODEL, batch=2, tree=TreeSize(16, 3), context=600, dtype=torch.float16)


def main() -> int:
    """Call every kernel on the list once and check its result; returns the exit status."""
    provider = "triton" if torch.cuda.is_available() else "reference"
    for name in OPS:
        for op in _ops(vars(importlib.import_module(f"specdec.bench.kernels.bench_{name}"))):
            op.check(provider, _SHAPE)
            print(f"{op.name}/{provider}: right", flush=True)
    return 0


def _ops(module: Mapping[str, Any]) -> list[BenchOp]:
    """The ops of a benchmark file, which may hold several in a dictionary."""
    values = [value for name in module for value in (module[name].values() if name == "OPS" else [module[name]])]
    return [value for value in values if isinstance(value, BenchOp)]


if __name__ == "__main__":
    sys.exit(main())
