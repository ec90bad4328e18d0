"""`specdec train`: train a drafter of any kind for a frozen target.

The target reads every batch once, without gradients, and an `Objective` turns what it says into a loss for the
drafter's network. At each evaluation the network drafts for real: `tau` is measured on held-out prompts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput

from specdec.common.files import check_replaceable
from specdec.drafting.base import Drafter
from specdec.drafting.folder import TargetRecord
from specdec.drafting.network import NetworkDrafter
from specdec.models.target.target import Target
from specdec.training.data import Collate, Sample, Samples, Texts, collate, token_counts
from specdec.training.kinds import objective_class, setting_names, training_settings
from specdec.training.objectives.base import Objective
from specdec.training.objectives.eagle import most_frequent_tokens
from specdec.training.objectives.recipe import Run
from specdec.training.runs.batches import Reading
from specdec.training.runs.curves import curves_svg, history_curves
from specdec.training.runs.probe import TauProbe, probe_prompts, probe_stats
from specdec.training.runs.record import claim, data_record, is_first_process, release, run_record, told_history
from specdec.training.runs.trainer import RecipeTrainer, check_packages, run_training
from specdec.training.states import StateStore
from specdec.training.step import Labels, TrainingStep
from specdec.trees.dynamic import AnyTreeLike, as_tree

__all__ = ["Labels", "train_drafter"]

_MAX_HELD_OUT = 64  # texts that an evaluation looks at


class _DrafterTrainer(RecipeTrainer):
    """Trains, and measures tau at each evaluation."""

    def __init__(self, *args: Any, prompts: Sequence[torch.Tensor], new_tokens: int, tree: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._tree = tree

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the base, with the progress told to the objective."""
        self.model.progress = self.state.global_step / self.state.max_steps
        return super().training_step(model, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the base, with the measured acceptance length and acceptance by depth."""
        output = super().evaluation_loop(*args, **kwargs)
        training: TrainingStep = self.accelerator.unwrap_model(self.model)
        if self._prompts and (self.is_world_process_zero() or training.target.sharding is not None):
            stats = probe_stats(training.objective, training.target, self._prompts, self._new_tokens, self._tree)
            output.metrics["eval_tau"] = stats.tau
            for depth, rate in enumerate(stats.acceptance_at_depth, start=1):
                output.metrics[f"eval_acceptance_{depth}"] = rate
        return output


def train_drafter(
    kind: str,
    target: PreTrainedModel | Target,
    texts: Texts | str | Path | Sequence[Sample],
    output: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    run: Run | None = None,
    labels: Labels = "text",
    tree: AnyTreeLike | None = None,
    probe: TauProbe | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    dtype: torch.dtype | None = None,
    states: str | Path | None = None,
) -> dict[str, float]:
    """Train a drafter and save it to a folder that `specdec.load_drafter` reads.

    Args:
        kind: what to train.
        target: the frozen target, in float32 or bfloat16, on the device where training runs.
        texts: what to learn from; a file of token ids or samples need no `Texts` around them.
        output: receives the drafter, `training.json` (recipe and report) and `curves.svg`, in one step at the end.
        settings: of the kind: fields of its network's configuration and switches of its loss.
        run: how long, how large the batches, how often to evaluate; the paper's recipe by default.
        labels: what drafters should guess: the text, or at each place the target's most probable token.
        tree: the tree that is measured with and saved; the kind's own by default.
        probe: how tau is measured.
        work_dir: checkpoints of the run; beside `output` by default. Removed when the run has ended.
        resume: go on with the interrupted run in `work_dir`.
        dtype: of the saved weights; the target's by default.
        states: folder that keeps what the target says about the texts, for further epochs and further drafters, which
            then do without it; created if missing. By default the target reads every batch anew.

    Returns:
        The report: `held_out_loss` and its parts, `tau`, `acceptance_1`, ..., `num_parameters`.

    Raises:
        TypeError: a setting that the kind does not have.
        ValueError: bad arguments, malformed data, or a work directory that holds another run.
        NonFiniteLossError: the loss became NaN or infinite; checkpoints before it are kept.
    """
    target = target if isinstance(target, Target) else Target(target)
    run, output = run or Run(), Path(output)
    check_replaceable(output, "output")  # before hours of work
    check_packages(run)
    work_dir = output.with_name(f".{output.name}-training") if work_dir is None else Path(work_dir)
    if target.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"target: expected float32 or bfloat16 weights for training, got {target.dtype}")
    if labels not in ("text", "target"):
        raise ValueError(f"labels: expected 'text' or 'target', got {labels!r}")
    texts, probe = texts if isinstance(texts, Texts) else Texts(texts), probe or TauProbe()
    train, held_out = texts.read(target, run.seed)
    evaluated = held_out[:_MAX_HELD_OUT]

    torch.manual_seed(run.seed)
    objective = _objective(kind, target, dict(settings or {}), train)
    recipe, shape = run.applied_to(objective.recipe), None if tree is None else as_tree(tree)
    about = _record(kind, settings or {}, labels, train, held_out) | data_record(texts, train, held_out)
    record = about | run_record(target, recipe, run, probe, shape)
    claim(work_dir, record, resume=resume)
    frequent = most_frequent_tokens(token_counts(train, target.vocab_size), (run.num_candidates or 0) // 2)
    batches = collate if states is None else _collate_with(Path(states), target, objective, [*train, *evaluated])
    metrics, log = run_training(
        TrainingStep(objective, target, labels, run, frequent).to(target.device),
        work_dir,
        recipe=recipe,
        run=run,
        train=Samples(train),
        held_out=Samples(evaluated),
        reading=Reading(batches, num_tokens=_num_tokens, num_learnt=_num_learnt),
        mixed_precision=target.dtype == torch.bfloat16 if run.mixed_precision is None else run.mixed_precision,
        trainer_class=_DrafterTrainer,
        prompts=probe_prompts(held_out, target.max_positions, probe),
        new_tokens=probe.new_tokens,
        tree=shape,
        in_step=target.sharding is not None,
    )
    record["report"] = _report(metrics, objective)
    if is_first_process():
        _save(_finished(objective, target, shape, dtype or target.dtype), output, record, log)
        release(work_dir)
    return record["report"]


def _save(drafter: Any, output: Path, record: dict[str, Any], log: Sequence[Mapping[str, float]]) -> None:
    """Write a trained drafter with its curves and its record, with the minutes and the history of its run."""
    record = {**record, "minutes": round(log[-1]["minutes"], 4), "history": told_history(log)}
    title = f"{record['kind']}, {record['num_texts']} texts"
    curves = curves_svg(history_curves(log), title)
    drafter.save_pretrained(output, texts={"training.json": json.dumps(record, indent=2) + "\n", "curves.svg": curves})


def _num_tokens(sample: Sample) -> int:
    return sample.tokens.shape[0]


def _num_learnt(sample: Sample) -> int:
    """Places of a text that are learnt. Token 2 is the first that a drafter guesses."""
    return int(sample.loss_mask[2:].sum())


def _objective(kind: str, target: Target, settings: dict[str, Any], train: Sequence[Sample]) -> Objective:
    """The objective of a kind, its network in float32 on the target's device."""
    objective_type = objective_class(kind)
    settings = {**training_settings(kind), **settings}
    if "draft_vocab_size" in settings and "draft_tokens" not in settings:
        counts = token_counts(train, target.vocab_size)
        settings["draft_tokens"] = most_frequent_tokens(counts, settings["draft_vocab_size"])
    try:
        objective = objective_type.new(target, **settings)
    except TypeError as error:
        known = ", ".join(setting_names(kind))
        raise TypeError(f"settings: {kind} does not take these: {error}; it has {known}") from error
    return objective.to(device=target.device, dtype=torch.float32)


def _collate_with(folder: Path, target: Target, objective: Objective, samples: Sequence[Sample]) -> Collate:
    """Makes batches with the target's states of these texts, which it has read and the folder keeps."""
    store = StateStore(folder, target, objective.tap_layers)
    store.read(samples)
    return store.collate


_BEGINNINGS = ("eagle", "model")
"""Settings that may name a folder of weights to begin with; other words, such as a variant, are no paths."""


def _record(
    kind: str, settings: Mapping[str, Any], labels: Labels, train: Sequence[Sample], held_out: Sequence[Sample]
) -> dict[str, Any]:
    """What makes a run the same run again, and what its results should be judged by."""
    plain = {name: value for name, value in settings.items() if _is_plain(value)}
    # a name that is none of a folder's says by itself which weights it means
    named = {name: Path(settings[name]) for name in _BEGINNINGS if settings.get(name) is not None}
    folders = {name: path for name, path in named.items() if path.is_dir()}
    return {
        "kind": kind,
        "settings": plain | {name: folder.name for name, folder in folders.items()},  # as folders move
        **({"begins_with": {name: _weights(folder) for name, folder in folders.items()}} if folders else {}),
        "labels": labels,
        "num_texts": len(train),
        "num_held_out": len(held_out),
        "num_tokens": sum(sample.tokens.shape[0] for sample in train),
    }


def _report(metrics: Mapping[str, float], objective: Objective) -> dict[str, float]:
    """The metrics of the last evaluation, without times, which belong to the machine."""
    names = [name for name in metrics if not name.endswith(("_runtime", "_per_second"))]
    report = {name.removeprefix("eval_"): metrics[name] for name in names}
    report["held_out_loss"] = report.pop("loss")
    report["num_parameters"] = float(sum(parameter.numel() for parameter in objective.network.parameters()))
    return report


def _finished(objective: Objective, target: Target, tree: Any, dtype: torch.dtype) -> Any:
    """The trained drafter, ready to be saved."""
    objective.network.to(dtype).eval()
    drafter: Drafter = objective.drafter(tree)
    if isinstance(drafter, NetworkDrafter):
        drafter.target_record = TargetRecord.of(target)
    return drafter


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)


def _weights(folder: Path) -> str:
    """SHA-256 of the weights in a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
