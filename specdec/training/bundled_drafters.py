"""Drafters of the models that go by a name: how one is made, from a line of a table, and a table of what came out.

Their tables are in `tiny_drafters.py` and `smollm2_drafters.py`; all go through the same `train_drafter` as any other.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from transformers import PreTrainedModel

from specdec.drafters.load import load_drafter
from specdec.drafting.folder import TREE
from specdec.models.target.target import Target
from specdec.training.data import Sample, Texts
from specdec.training.grown_tree import grown_tree
from specdec.training.objectives.recipe import Run
from specdec.training.runs.probe import TauProbe
from specdec.training.runs.record import is_first_process
from specdec.training.states import StateStore
from specdec.training.train import Labels, train_drafter
from specdec.trees.shape import TreeShape

__all__ = ["BundledDrafter", "drafters_table", "missing_parts", "train_bundled_drafter"]


@dataclass(frozen=True, slots=True)
class BundledDrafter:
    """How one drafter is made.

    Attributes:
        kind: what to train.
        steps: optimiser steps.
        learning_rate: peak of the schedule.
        paths: rank paths of the tree that it is measured and saved with; None for its kind's own.
        settings: of the kind, as for `train_drafter`.
        batch_size: texts per step.
        eagle: the drafter, by its name in the same folder, that the training of this one begins with.
        labels: what it should guess, as for `train_drafter`.
        run: further fields of its `Run`.
        grown: nodes and depth of a tree that is grown for it after its training, on held-out texts, and saved in place
            of `paths`; None to keep these.
    """

    kind: str
    steps: int
    learning_rate: float
    paths: tuple[tuple[int, ...], ...] | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    eagle: str | None = None
    labels: Labels = "target"
    run: Mapping[str, Any] = field(default_factory=dict)
    grown: tuple[int, int] | None = None


def missing_parts(parts: Sequence[str], only: Sequence[str] | None, output: Path) -> list[str]:
    """Those of `only`, or of all `parts`, that have no folder in `output` yet, in the order of the parts.

    Raises:
        ValueError: `only` names a part that does not exist.
    """
    unknown = sorted(set(only or ()) - set(parts))
    if unknown:
        raise ValueError(f"only: expected some of {', '.join(parts)}, got {', '.join(unknown)}")
    return [part for part in parts if part in (only or parts) and not (output / part).exists()]


def train_bundled_drafter(
    recipe: BundledDrafter,
    target: PreTrainedModel | Target,
    texts: Texts,
    output: Path,
    work_dir: Path,
    *,
    probe: TauProbe,
    states: Path | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Train one drafter and save it, in half precision and with its tree, to `output`.

    Args:
        recipe: what to train.
        target: the target, in float32 or bfloat16.
        texts: what to learn from and to hold out.
        output: receives the drafter; replaced only once training is done.
        work_dir: checkpoints; if it holds some, training goes on from them. A drafter whose tree has yet to grow waits
            beside it.
        probe: how tau is measured.
        states: folder that keeps what the target says about the texts, as for `train_drafter`.
        seed: of the order of the texts and of all noise.

    Returns:
        The report of `train_drafter`.

    Raises:
        FileNotFoundError: the drafter that this one begins with is not there.
        ValueError: a tree to be grown and no `states`.
    """
    if recipe.grown is not None and states is None:
        raise ValueError("states: expected a folder, as the tree is grown on what it keeps, got None")
    target = target if isinstance(target, Target) else Target(target)
    settings = dict(recipe.settings)
    if recipe.eagle is not None:
        head = output.parent / recipe.eagle
        if not head.exists():
            raise FileNotFoundError(
                f"output: expected {recipe.eagle} in {output.parent}, with which {output.name} begins, got none; "
                "train it first"
            )
        settings["eagle"] = str(head)
    run = {
        "steps": recipe.steps,
        "batch_size": recipe.batch_size,
        "learning_rate": recipe.learning_rate,
        "eval_every": max(1, recipe.steps // 4),
        "log_every": max(1, recipe.steps // 50),
        "seed": seed,
        "mixed_precision": True,
    }
    trained = output if recipe.grown is None else work_dir.with_name(f"{work_dir.name}-trained")
    if trained.exists():
        report: dict[str, float] = json.loads((trained / "training.json").read_text(encoding="utf-8"))["report"]
    else:
        report = train_drafter(
            recipe.kind,
            target,
            texts,
            trained,
            settings=settings,
            run=Run(**{**run, **recipe.run}),
            labels=recipe.labels,
            tree=None if recipe.paths is None else TreeShape.from_paths(recipe.paths),
            probe=probe,
            work_dir=work_dir,
            resume=True,
            dtype=torch.float16,
            states=states,
        )
    if recipe.grown is not None and states is not None and is_first_process():
        _grow(recipe.grown, target, trained, texts.read(target, seed)[1], states)
        output.parent.mkdir(parents=True, exist_ok=True)
        trained.replace(output)
    return report


def _grow(sizes: tuple[int, int], target: Target, folder: Path, held_out: Sequence[Sample], states: Path) -> None:
    """Give a saved drafter the tree that grows on held-out texts."""
    drafter = load_drafter(folder, target)
    drafter.bind(target)
    store = StateStore(states, target, target.tap_layers)
    store.read(held_out)
    num_nodes, depth = sizes
    grown_tree(target, drafter, store, held_out, num_nodes=num_nodes, depth=depth).save(folder / TREE)


def drafters_table(folder: Path, names: Iterable[str], title: str) -> Table:
    """What became of each drafter, by its `training.json`: one row per name, empty where none was trained."""
    caption = "loss, tau and acceptance by depth: of held-out texts"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False)  # fits 80 columns
    table.add_column("drafter", no_wrap=True)
    for column in ("size", "texts", "loss", "tau", "by depth", "min"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in names:
        file = folder / name / "training.json"
        if not file.exists():
            table.add_row(name, *["-"] * 6)
            continue
        record = json.loads(file.read_text(encoding="utf-8"))
        report, run = record["report"], record["run"]
        depths = (report.get(f"acceptance_{depth}") for depth in (1, 2, 3))
        table.add_row(
            name,
            f"{report['num_parameters'] / 1e6:.1f} M",
            str(run["steps"] * run["batch_size"]),
            f"{report['held_out_loss']:.3f}",
            f"{report['tau']:.2f}" if "tau" in report else "-",
            " ".join(f"{rate:.2f}" for rate in depths if rate is not None),
            f"{record['minutes']:.0f}" if "minutes" in record else "-",
        )
    return table
