"""What a run keeps of itself: the record by which it is known again, and which ends up in `training.json`.

A run that is resumed must be the same run: kind, settings, data and target, by their content. Where files lie, what
machine computes and who looks on may differ.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from specdec import __version__
from specdec.common.files import replace_file
from specdec.common.source import source_commit
from specdec.drafting.folder import TargetRecord
from specdec.models.target.target import Target
from specdec.training.data import Sample, Texts, data_hash
from specdec.training.objectives.recipe import Recipe, Run
from specdec.training.runs.probe import TauProbe
from specdec.training.runs.trainer import forget_checkpoints, last_checkpoint

__all__ = ["claim", "data_record", "is_first_process", "release", "run_record", "told_history"]

_RUN_RECORD = "run.json"
_MAY_DIFFER = ("data.file", "data.held_out_file", "target.name", "run.report_to", "made")


def is_first_process() -> bool:
    """Whether this is the process that writes files and speaks, of those that torchrun started."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def data_record(texts: Texts, train: Sequence[Sample], held_out: Sequence[Sample]) -> dict[str, Any]:
    """Where the texts come from, and SHA-256 of the files and of what is learnt and held out of them."""
    digest = hashlib.sha256()
    for samples in (train, held_out):
        digest.update(f"{len(samples)} texts".encode())
        for sample in samples:
            digest.update(f"{sample.tokens.shape[0]} tokens".encode())
            digest.update(sample.tokens.numpy().tobytes())
            digest.update(sample.loss_mask.numpy().tobytes())
    record: dict[str, Any] = {"texts_sha256": digest.hexdigest()}
    for name, source in (("", texts.source), ("held_out_", texts.held_out)):
        if isinstance(source, str | Path):
            record |= {f"{name}file": _shown(source), f"{name}sha256": data_hash(source)}
        elif isinstance(source, int | float):
            record["held_out"] = source
    return {"data": record}


def run_record(target: Target, recipe: Recipe, run: Run, probe: TauProbe, tree: Any) -> dict[str, Any]:
    """The target, by name, sizes and fingerprint; how it is trained and measured; and what computes.

    Args:
        target: the frozen target.
        recipe: with the run's changes applied.
        run: those changes.
        probe: how tau is measured.
        tree: what it is measured with; None for the kind's own.
    """
    return {
        "target": {"name": _shown(target.model.config.name_or_path or "-"), **asdict(TargetRecord.of(target))},
        "tree": None if tree is None else json.loads(tree.to_json()),
        "recipe": asdict(recipe),
        "run": asdict(run),
        "probe": asdict(probe),
        "made": _made_by(target),
    }


def _made_by(target: Target) -> dict[str, Any]:
    """Versions, the commit of this code, the device."""
    on_gpu = target.device.type == "cuda"
    return {
        "specdec": __version__,
        **source_commit(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(target.device) if on_gpu else platform.processor() or platform.machine(),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def told_history(log: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The entries of the trainer's log that tell of a loss, without what belongs to the machine."""
    return [
        {name: value for name, value in entry.items() if name != "epoch" and not name.endswith(("_runtime", "_second"))}
        for entry in log
        if "loss" in entry or "eval_loss" in entry
    ]


def claim(work_dir: Path, record: Mapping[str, Any], *, resume: bool) -> None:
    """Note the run in its work directory, or see that the run there is the same.

    Raises:
        ValueError: there are checkpoints and `resume` was not asked for, or they are another run's; says what differs.
    """
    file = work_dir / _RUN_RECORD
    now = json.loads(json.dumps(record))
    if last_checkpoint(work_dir) is not None and file.exists():
        if not resume:
            raise ValueError(
                f"work_dir: expected one without a run, got {work_dir} with checkpoints; resume goes on with that run"
            )
        before, after = _flat(json.loads(file.read_text(encoding="utf-8"))), _flat(now)
        changed = [
            f"{name} ({_brief(before.get(name))} there, {_brief(after.get(name))} here)"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name) and not name.startswith(_MAY_DIFFER)
        ]
        if changed:
            raise ValueError(f"resume: expected the run that {work_dir} holds, got another {', '.join(changed)}")
    if is_first_process():
        replace_file(file, json.dumps(now, indent=2) + "\n")


def release(work_dir: Path) -> None:
    """Clean up after a run that has ended."""
    forget_checkpoints(work_dir)
    work_dir.joinpath(_RUN_RECORD).unlink()
    if not any(work_dir.iterdir()):
        work_dir.rmdir()


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _shown(path: str | Path) -> str:
    """A path, or its name alone if it is absolute: folders belong to the machine."""
    return Path(path).name if Path(path).is_absolute() else str(path)
