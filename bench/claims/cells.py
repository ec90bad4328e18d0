"""Cells of drafters that are measured on one target: known by what is measured, the drafter's files and the setup.

A cell that the file of records has is not measured again, unless one of these has changed; a run that was cut off goes
on where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specdec.bench.claims.arms import Arm, Bench, Counts, Sizes
from specdec.bench.common.journal import Journal
from specdec.common.provenance import provenance, read_records
from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS
from specdec.drafting.folder import TREE
from specdec.evaluation.replay import Recording

__all__ = ["DrafterCells", "as_record", "counts_of", "setup_of"]

_TELLING = frozenset({"specdec.json", "config.json", TREE})
"""What a drafter is, beside its weights."""


class DrafterCells:
    """What is measured of a folder of drafters.

    Args:
        output: JSON lines, which are appended to.
        folder: holds the drafters by name.
        setup: what all cells have in common, as `setup_of` gives it.
        bench: the name of the benchmark, for the records.
    """

    def __init__(self, output: Path, folder: Path, setup: Mapping[str, Any], bench: str) -> None:
        self.setup = dict(setup)
        self._output = output
        self._folder = folder
        self._bench = bench
        self._key = _digest(json.dumps(self.setup, sort_keys=True).encode())
        self._digests: dict[str, str] = {}
        self._journal = Journal(output, resume=True)
        self._records = {one["cell"]: one for one in read_records(output) if "cell" in one}

    def measure(self, what: str, drafter: str, measure: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Measure a cell if it is due.

        Args:
            what: is measured.
            drafter: a kind without weights, or the name of a folder.
            measure: gives the fields of the record.

        Returns:
            The new record; None if the cell is not due.
        """
        cell = self._cell(what, drafter)
        if not self._journal.is_due(cell):
            return None
        self._journal.begin(cell)
        begin = time.perf_counter()
        record = {"bench": self._bench, "arm": what, "drafter": drafter, "setup": self.setup, **measure()}
        record |= self._trained(drafter)
        record |= {"seconds": round(time.perf_counter() - begin, 1), "provenance": provenance()}
        self._journal.end(cell, record)
        self._records[cell] = {**record, "cell": cell}
        return record

    def find(self, what: str, drafter: str) -> Mapping[str, Any] | None:
        """The record of a cell as it would be measured now; None if there is none."""
        return self._records.get(self._cell(what, drafter))

    def recording(self, bench: Bench) -> Recording:
        """Plain decoding of all prompts, kept beside the records."""
        taps = "".join(f"-{layer}" for layer in bench.target.tap_layers)
        file = self._output.with_name(f"{self._output.stem}-{self._key}{taps}.recording.pt")
        if file.exists():
            return Recording.load(file)
        recording = bench.record()
        recording.save(file)
        return recording

    def _trained(self, drafter: str) -> dict[str, Any]:
        """How long a drafter was trained, and its parameters, if its folder says so."""
        file = self._folder / drafter / "training.json"
        if drafter in KINDS_WITHOUT_WEIGHTS or not file.exists():
            return {}
        told = json.loads(file.read_text(encoding="utf-8"))
        run = {name: told["run"][name] for name in ("steps", "batch_size", "seed")}
        return {"trained": run | {"num_parameters": int(told["report"]["num_parameters"])}}

    def _cell(self, what: str, drafter: str) -> str:
        if drafter not in self._digests:
            files = [] if drafter in KINDS_WITHOUT_WEIGHTS else sorted((self._folder / drafter).iterdir())
            kept = [file for file in files if file.suffix == ".safetensors" or file.name in _TELLING]
            self._digests[drafter] = _digest(*(file.read_bytes() for file in kept))
        return f"{what} | {drafter} {self._digests[drafter]} | {self._key}"


def setup_of(
    model: str, dtype: torch.dtype, file: Path, prompts: Sequence[torch.Tensor], sizes: Sizes
) -> dict[str, Any]:
    """What makes figures comparable: nothing of it names a place on this machine.

    Args:
        model: the target, by the name or path that it was loaded by.
        dtype: of the target.
        file: that the prompts are from.
        prompts: token ids.
        sizes: how much is decoded.
    """
    ids = json.dumps([prompt.tolist() for prompt in prompts]).encode()
    return {
        "model": Path(model).name,
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": f"{file.parent.name}/{file.name}",
        "num_prompts": len(prompts),
        "prompt_ids": _digest(ids),
        **asdict(sizes),
    }


def as_record(bench: Bench, arm: Arm, drafter: str) -> dict[str, Any]:
    """The counts of an arm as a record has them.

    Raises:
        NotRunError: the drafter cannot do what is asked of it.
    """
    return {"counts": [[place, *pair] for place, pair in bench.measure(arm, drafter).items()]}


def counts_of(record: Mapping[str, Any]) -> Counts:
    """The counts that a record has."""
    return {int(place): (above, below) for place, above, below in record["counts"]}


def _digest(*parts: bytes) -> str:
    """Eight hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:8]
