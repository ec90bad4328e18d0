"""The training loop that everything here shares: Hugging Face's Trainer, with a `Recipe` for optimiser and schedule.

On top of the Trainer: a loss or gradient that is not finite stops the run before it reaches the weights; an interrupted
run resumes from its last complete checkpoint, never from a half-written one; gradients may be clipped by element;
learning rates fall to a part of their peak; the parts of a loss are logged with it.
"""

import functools
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from specdec.training.objectives.recipe import Recipe, Run, learning_rate_factor

__all__ = ["NonFiniteLossError", "RecipeTrainer", "forget_checkpoints", "last_checkpoint", "run_training"]

logger = logging.getLogger(__name__)

_COMPLETE = "complete"  # a file in every checkpoint that was written to its end


class NonFiniteLossError(RuntimeError):
    """A loss or gradient is NaN or infinite, so that the run cannot go on."""


class RecipeTrainer(Trainer):
    """A Trainer for a module whose `forward(**batch)` gives `{"loss": ..., parts ...}`.

    Args:
        model: the module; parts are scalars by name.
        recipe: optimiser and schedule.
        arguments: of transformers' Trainer.
        kwargs: further arguments of transformers' Trainer.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, arguments: TrainingArguments, **kwargs: Any) -> None:
        super().__init__(model, arguments, **kwargs)
        self.recipe = recipe
        self._parts: dict[bool, list[dict[str, torch.Tensor]]] = {True: [], False: []}  # by model.training
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.progress_bar = _ProgressBar()
        for callback in (_Guard(recipe.clip_value), _MarkComplete(), self.progress_bar):
            self.add_callback(callback)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The recipe's schedule."""
        factor = functools.partial(learning_rate_factor, self.recipe, num_training_steps)
        self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss, checked; its parts are added up until they are logged."""
        outputs = model(**inputs)
        loss = outputs["loss"]
        if not torch.isfinite(loss):
            phase = "training" if model.training else "evaluation after"
            raise NonFiniteLossError(
                f"loss: expected a finite value, got {float(loss.detach())} in {phase} step "
                f"{self.state.global_step + model.training}"
            )
        parts = {name: value.detach() for name, value in outputs.items() if name != "loss" and _is_scalar(value)}
        self._parts[model.training].append(parts)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """The loss alone."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the base, with the parts of the loss among the metrics."""
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics.update({f"eval_{name}": value for name, value in self._take_mean_parts(training=False).items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the base, with the parts of the training loss beside it."""
        if "loss" in logs:
            logs = {**logs, **self._take_mean_parts(training=True)}
        super().log(logs, *args, **kwargs)

    def _take_mean_parts(self, *, training: bool) -> dict[str, float]:
        """Means since the last call; a batch that lacks a part, because its texts are short, counts as zero."""
        parts, self._parts[training] = self._parts[training], []
        names = dict.fromkeys(name for one in parts for name in one)
        return {name: float(sum(one.get(name, 0.0) for one in parts)) / len(parts) for name in names}


def run_training(
    model: nn.Module,
    work_dir: Path,
    *,
    recipe: Recipe,
    run: Run,
    train: Dataset[Any],
    held_out: Dataset[Any],
    collate: Callable[[list[Any]], Mapping[str, torch.Tensor]],
    mixed_precision: bool,
    trainer_class: type[RecipeTrainer] = RecipeTrainer,
    **trainer_kwargs: Any,
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train `model`, resuming from the last complete checkpoint in `work_dir` if there is one.

    Args:
        model: see `RecipeTrainer`.
        work_dir: checkpoints go here; created if missing.
        recipe: optimiser and schedule; the run's changes applied.
        run: how long, and how it is watched.
        train: what is learnt.
        held_out: what is evaluated on.
        collate: makes a batch, the keywords of the model's `forward`, from items of these.
        mixed_precision: compute in bfloat16.
        trainer_class: a `RecipeTrainer` with other metrics.
        trainer_kwargs: further arguments of it.

    Returns:
        The metrics of the final evaluation, `eval_loss` among them, and the log of the whole run.

    Raises:
        NonFiniteLossError: the message says at which step, and where the last good checkpoint is.
        OSError: a checkpoint could not be written.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    on_cpu = next(model.parameters()).device.type == "cpu"
    arguments = _arguments(work_dir, recipe, run, len(train), mixed_precision, on_cpu)  # type: ignore[arg-type]
    if arguments.n_gpu > 1:
        raise RuntimeError(
            f"training: expected one process per GPU, got one for {arguments.n_gpu}; start with torchrun"
        )
    trainer = trainer_class(
        model, recipe, arguments, train_dataset=train, eval_dataset=held_out, data_collator=collate, **trainer_kwargs
    )
    resumed = last_checkpoint(work_dir)
    if resumed is not None:
        logger.info("training: goes on from %s", resumed)
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        history = trainer.state.log_history
        last = next((entry for entry in reversed(history) if "eval_loss" in entry), None)
        metrics = last if last is not None and last["step"] == arguments.max_steps else trainer.evaluate()
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"{error}; {_what_is_kept(work_dir)}") from error
    except OSError as error:
        raise OSError(f"training: stopped by {error}; {_what_is_kept(work_dir)}") from error
    finally:
        trainer.progress_bar.close()
    return {name: value for name, value in metrics.items() if name.startswith("eval_")}, trainer.state.log_history


def _arguments(
    work_dir: Path, recipe: Recipe, run: Run, num_texts: int, mixed_precision: bool, on_cpu: bool
) -> TrainingArguments:
    """Recipe and run in the Trainer's words."""
    parts = run.accumulate * int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.batch_size % parts:
        raise ValueError(
            f"batch_size: expected a multiple of {parts}, processes times accumulate, got {recipe.batch_size}"
        )
    steps = run.steps or math.ceil(num_texts / recipe.batch_size) * recipe.epochs
    eval_every = run.eval_every or max(1, steps // 10)
    return TrainingArguments(
        output_dir=str(work_dir),
        per_device_train_batch_size=recipe.batch_size // parts,
        per_device_eval_batch_size=recipe.batch_size // parts,
        gradient_accumulation_steps=run.accumulate,
        max_steps=steps,
        learning_rate=recipe.learning_rate,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip_norm if recipe.clip_value is None else 0.0,
        bf16=mixed_precision,
        use_cpu=on_cpu,
        seed=run.seed,
        logging_steps=run.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=eval_every,
        save_steps=eval_every,
        save_total_limit=2,  # the older one stands in for a newer one that was not written to its end
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to=[],
    )


def last_checkpoint(work_dir: Path) -> Path | None:
    """The newest checkpoint in `work_dir` that was written to its end."""
    complete = [path.parent for path in work_dir.glob(f"checkpoint-*/{_COMPLETE}")]
    return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)


def forget_checkpoints(work_dir: Path) -> None:
    """Remove the checkpoints of a run that has ended."""
    for path in work_dir.glob("checkpoint-*"):
        shutil.rmtree(path)


def _what_is_kept(work_dir: Path) -> str:
    kept = last_checkpoint(work_dir)
    return "no checkpoint was written yet" if kept is None else f"the last good checkpoint is {kept}"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


class _Guard(TrainerCallback):
    """Between the gradients and the optimiser: stops what is not finite, and clips by element."""

    def __init__(self, clip_value: float | None) -> None:
        self.clip_value = clip_value

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise NonFiniteLossError(
                f"gradient: expected finite values, got a norm of {float(norm)} in training step "
                f"{state.global_step + 1}"
            )
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(kwargs["model"].parameters(), self.clip_value)


class _MarkComplete(TrainerCallback):
    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.output_dir is not None:
            Path(args.output_dir, f"checkpoint-{state.global_step}", _COMPLETE).touch()


class _ProgressBar(TrainerCallback):
    """One line on standard error if that is a terminal, logged lines otherwise."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        console = Console(stderr=True)
        if state.is_world_process_zero and console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        self._shown |= {name: logs[name] for name in ("loss", "eval_loss", "eval_tau") if name in logs}
        names = {"loss": "loss", "eval_loss": "held out", "eval_tau": "tau"}
        text = ", ".join(f"{names[name]} {value:.3f}" for name, value in self._shown.items())
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif state.is_world_process_zero:
            logger.info("step %d of %d: %s", state.global_step, state.max_steps, text)

    def close(self) -> None:
        """Take the line away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
