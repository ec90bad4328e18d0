"""Settings that every training here shares: AdamW (.9, .95), clip 1.0, warm-up, cosine to 5%, bf16, resumable."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

__all__ = ["run_training"]


def run_training(
    model: nn.Module,
    work_dir: Path,
    *,
    train: Dataset[dict[str, torch.Tensor]],
    held_out: Dataset[dict[str, torch.Tensor]],
    batch_size: int,
    num_steps: int,
    learning_rate: float,
    warmup_steps: int,
    weight_decay: float = 0.1,
    seed: int = 0,
    save_steps: int = 250,
    trainer_class: type[Trainer] = Trainer,
    **trainer_kwargs: Any,
) -> dict[str, float]:
    """Train `model`, resuming from the last checkpoint in `work_dir` if there is one.

    Args:
        model: a module whose `forward(input_ids, labels)` returns a loss, as transformers models do.
        work_dir: checkpoints go here; created if missing.
        train: items `{"input_ids", "labels"}`.
        held_out: the same, for the evaluation at the end.
        batch_size: items per step.
        num_steps: optimiser steps.
        learning_rate: peak of the schedule.
        warmup_steps: steps of linear warm-up.
        weight_decay: on matrices only.
        seed: of the data order.
        save_steps: steps between checkpoints.
        trainer_class: a `transformers.Trainer` subclass, for another loss or other metrics.
        trainer_kwargs: further arguments of the trainer.

    Returns:
        The metrics of the final evaluation, `eval_loss` among them.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(work_dir),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        max_steps=num_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=warmup_steps,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=weight_decay,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        logging_steps=50,
        save_steps=save_steps,
        save_total_limit=1,
        report_to=[],
    )
    trainer = trainer_class(model, arguments, train_dataset=train, eval_dataset=held_out, **trainer_kwargs)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work_dir)))
    return trainer.evaluate()
