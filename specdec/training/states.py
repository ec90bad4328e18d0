"""A folder that keeps what the target says about texts, so that further epochs and drafters do without the target.

Per text: the states that enter the LM head, the most probable token in place of each learnt one, and the outputs of
layers that a drafter asks for. A text is known by its tokens and what is learnt of it, so that runs on parts of a data
set, in any order, share what they have in common. Laws are not kept: the LM head makes them from the states.

Files: `store.json` says whose states these are; of each kind of tensor `NAME.bin` holds the rows of all texts, and
`NAME.index` a line for each text that is complete, so that an interrupted reading goes on. Numbers are float16.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from specdec.drafting.folder import TargetRecord
from specdec.models.target.families import is_decoder_and_head
from specdec.models.target.target import Target
from specdec.training.data import Sample, collate
from specdec.training.objectives.base import most_probable

__all__ = ["StateStore"]

# that the target reads in one pass; on a CPU what a pass computes stays in its caches, which makes it a quarter faster
_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_ON_CPU = 8192, 1024
_BEST = np.dtype("<i4")
_STATE = np.dtype("<f2")


class StateStore:
    """What one target says, in a folder.

    Args:
        folder: the folder; created if missing.
        target: the target.
        tap_layers: decoder layers whose outputs are kept too.

    Attributes:
        folder, target, tap_layers: as given.

    Raises:
        ValueError: the folder holds another target's states, or this target's logits are more than an LM head on its
            states.
    """

    def __init__(self, folder: Path, target: Target, tap_layers: Sequence[int] = ()) -> None:
        if target.sharding is not None or not is_decoder_and_head(target.model):
            raise ValueError(
                "states: expected a target whose logits are its LM head's on its last states, of one of the checked "
                f"families and not sharded, got {type(target.model).__name__}"
            )
        self.folder = folder
        self.target = target
        self.tap_layers = tuple(tap_layers)
        self._taps = target.tap(tap_layers)
        self._names = ("hidden", *(f"layer_{layer}" for layer in tap_layers))
        self._rows: dict[str, dict[str, tuple[int, int]]] = {}  # of each file: text -> first row, number of rows
        self._data: dict[str, np.ndarray[Any, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._claim()

    def read(self, samples: Sequence[Sample]) -> None:
        """Have the target read those of the texts that are not kept yet. Of several processes one reads.

        Raises:
            ValueError: a state too large for float16.
            OSError: the disk is full; what is complete is kept.
        """
        with FileLock(self.folder / "lock"):
            self._open()
            kept = set.intersection(*(set(self._rows[name]) for name in self._names))
            at_once = _TOKENS_AT_ONCE_ON_CPU if self.target.device.type == "cpu" else _TOKENS_AT_ONCE
            missing = {_name_of(sample): sample for sample in samples if _name_of(sample) not in kept}
            batches = list(_batches(sorted(missing.values(), key=lambda sample: len(sample.tokens)), at_once))
            console = Console(stderr=True)
            for batch in track(batches, "the target reads", console=console, disable=not batches, transient=True):
                self._append(batch)
            self._open()

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """A batch as `specdec.training.data.collate` makes it, with `hidden`, `best` and, of layers, `taps`."""
        batch = collate(samples)
        shape = batch["input_ids"].shape
        width = self.target.hidden_size
        states = torch.zeros(len(self._names), *shape, width, dtype=torch.float16)
        best = torch.zeros(shape, dtype=torch.int64)
        for row, sample in enumerate(samples):
            for place, name in enumerate(self._names):
                states[place, row, : len(sample.tokens)] = self._of(name, _name_of(sample))
            best[row, : len(sample.tokens)] = self._of("best", _name_of(sample))
        kept = {"hidden": states[0], "best": best}
        return {**batch, **kept, **({"taps": states[1:]} if len(self._names) > 1 else {})}

    def _of(self, name: str, text: str) -> torch.Tensor:
        first, count = self._rows["hidden" if name == "best" else name][text]
        return torch.from_numpy(self._data[name][first : first + count].copy())

    def _claim(self) -> None:
        """Note whose states these are, or see that they are this target's."""
        file = self.folder / "store.json"
        record = json.loads(json.dumps({"target": asdict(TargetRecord.of(self.target)), "format": 1}))
        if not file.exists():
            file.write_text(json.dumps(record) + "\n", encoding="utf-8")
        elif json.loads(file.read_text(encoding="utf-8")) != record:
            raise ValueError(f"states: expected a folder of this target's states, got {self.folder} with another's")

    def _open(self) -> None:
        """Look at what is complete, and cut off what a crash left behind it."""
        for name in self._names:
            index = self.folder / f"{name}.index"
            index.touch()
            lines = index.read_bytes()
            os.truncate(index, lines.rfind(b"\n") + 1)
            rows = [json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith(b"\n")]
            self._rows[name] = {text: (first, count) for text, first, count in rows}
            end = rows[-1][1] + rows[-1][2] if rows else 0
            for file in ("hidden", "best") if name == "hidden" else (name,):
                row = (_BEST, 1) if file == "best" else (_STATE, self.target.hidden_size)
                data = self.folder / f"{file}.bin"
                data.touch()
                os.truncate(data, end * row[0].itemsize * row[1])
                shape = (end,) if file == "best" else (end, row[1])
                # an empty file cannot be mapped
                self._data[file] = np.memmap(data, row[0], "r", shape=shape) if end else np.zeros(shape, row[0])

    @torch.no_grad()
    def _append(self, samples: Sequence[Sample]) -> None:
        """Read some texts and write what is not there of each."""
        device = self.target.device
        batch = {name: tensor.to(device) for name, tensor in collate(samples).items()}
        output = self.target.read(batch["input_ids"])
        best = most_probable(output.scores, batch["loss_mask"])
        tensors = (output.hidden, *(output.taps[place] for place in self._taps))
        for name, states in zip(self._names, tensors, strict=True):
            states = states.half().cpu()
            lines, end = [], max((first + count for first, count in self._rows[name].values()), default=0)
            with (self.folder / f"{name}.bin").open("ab") as file, (self.folder / "best.bin").open("ab") as best_file:
                for row, sample in enumerate(samples):
                    text, count = _name_of(sample), len(sample.tokens)
                    if text in self._rows[name]:
                        continue
                    if not states[row, :count].isfinite().all():
                        raise ValueError(f"states: expected numbers that float16 can hold, got others in {name}")
                    file.write(states[row, :count].numpy().astype(_STATE).tobytes())
                    if name == "hidden":
                        best_file.write(best[row, :count].cpu().numpy().astype(_BEST).tobytes())
                    self._rows[name][text] = end, count
                    lines.append(json.dumps([text, end, count]) + "\n")
                    end += count
            with (self.folder / f"{name}.index").open("a", encoding="utf-8") as index:
                index.writelines(lines)


def _name_of(sample: Sample) -> str:
    """What tells a text and what is learnt of it from others."""
    return hashlib.sha256(sample.tokens.numpy().tobytes() + sample.loss_mask.numpy().tobytes()).hexdigest()[:24]


def _batches(samples: Sequence[Sample], num_tokens: int) -> Iterator[list[Sample]]:
    """Texts of like lengths, as many as the target reads at once."""
    batch: list[Sample] = []
    for sample in samples:
        if batch and (len(batch) + 1) * len(sample.tokens) > num_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
