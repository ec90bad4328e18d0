"""The training loop that everything here shares: Hugging Face's Trainer, with a `Recipe` for optimiser and schedule.

On top of the Trainer: the loss of a batch is the same in one process, in several, and in as many passes as memory asks
for (`batches.py`); a loss or gradient that is not finite stops the run before it reaches the weights; an interrupted
run resumes from its last complete checkpoint, never from a half-written one; gradients may be clipped by element;
learning rates fall to a part of their peak; the parts of a loss are logged with it.
"""

import functools
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from specdec.training.objectives.recipe import Recipe, Run, learning_rate_factor
from specdec.training.runs.batches import TOKENS_PER_PASS, Passes, Reading, Share, TextOrder, ran_out_of_memory
from specdec.training.runs.progress import RunProgress

__all__ = [
    "NonFiniteLossError",
    "RecipeTrainer",
    "check_packages",
    "forget_checkpoints",
    "last_checkpoint",
    "run_training",
]

T = TypeVar("T")

_PACKAGES = {
    "adamw_8bit": ("torchao", "bitsandbytes"),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
}
_OPTIMIZER_OF = {"torchao": "adamw_torch_8bit", "bitsandbytes": "adamw_8bit"}  # what the Trainer calls it
_NUM_CHECKPOINTS = 2  # that are kept: the older one, should somebody spoil the newer one
_COMPLETE = "complete"  # a file in every checkpoint that was written to its end


class NonFiniteLossError(RuntimeError):
    """A loss or gradient is NaN or infinite, so that the run cannot go on."""


class RecipeTrainer(Trainer):
    """A Trainer for a module whose `forward(**batch)` gives `{"loss": ..., parts ...}`.

    Args:
        model: the module; parts are scalars by name.
        recipe: optimiser and schedule.
        arguments: of transformers' Trainer.
        reading: how texts become batches.
        run: how many of them go through the model at a time, and how many places of each are learnt.
        in_step: all processes call the model equally often, because they share weights of it. Passes that run out of
            memory then end the run: another process would wait for this one.
        kwargs: further arguments of transformers' Trainer.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        arguments: TrainingArguments,
        *,
        reading: Reading,
        run: Run,
        in_step: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, arguments, data_collator=self._share, **kwargs)
        self.recipe = recipe
        self._reading, self._passes = reading, _passes(recipe, run, reading, self.args.world_size)
        self._most_learnt = math.inf if run.num_places is None else run.num_places
        self._in_step = in_step
        self._parts: list[dict[str, torch.Tensor]] = []  # of the training loss, by step, of this process
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.progress = RunProgress()
        for callback in (_Guard(recipe.clip_value), _MarkComplete(), self.progress):
            self.add_callback(callback)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The recipe's schedule."""
        factor = functools.partial(learning_rate_factor, self.recipe, num_training_steps)
        self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's share of every batch of the run."""
        order = TextOrder(len(self.train_dataset), self.recipe.batch_size, self.args.max_steps, self.args.seed)
        # a generator of its own, or the loader would draw from the one that the losses draw from
        return DataLoader(self.train_dataset, batch_sampler=order, collate_fn=self._share, generator=torch.Generator())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This process's share of all held-out texts, as one batch."""
        return DataLoader(
            self.eval_dataset,
            batch_sampler=[list(range(len(self.eval_dataset)))],
            collate_fn=self._share,
            generator=torch.Generator(),
        )

    def _share(self, items: list[Any], most_learnt: float = math.inf) -> dict[str, Share]:
        """What this process runs of a batch; in a dictionary, because the Trainer looks for labels in it."""
        rank, num_ranks = self.args.process_index, self.args.world_size
        return {"share": self._reading.share(items, rank, num_ranks, most_learnt=most_learnt)}

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: of a frozen target and a drafter it would say nothing."""
        return 0

    def training_step(
        self, model: nn.Module, inputs: dict[str, Share], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Gradients of the loss of the whole batch, over all processes, in passes that fit into memory.

        Returns:
            This process's part of the loss, times the number of processes: the Trainer logs the mean of these.
        """
        model.train()
        share = inputs["share"]
        with self.accelerator.no_sync(model):  # a pass that fails midway must leave nobody waiting
            loss, parts = self._within_memory(lambda: self._learn(model, share))
        self._sum_gradients(model)
        self._parts.append(parts)
        self.progress.num_tokens += share.num_tokens
        return loss * self.args.world_size

    def _learn(self, model: nn.Module, share: Share) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of this process's part of the loss, and the values of that part."""
        model.zero_grad(set_to_none=True)  # of an attempt that ran out of memory
        losses, parts = [], dict[str, torch.Tensor]()
        for items, weight in self._passes_of(share):
            values = self._losses(model, items)
            self.accelerator.backward(values["loss"] * weight)
            losses.append(values.pop("loss").detach() * weight)
            _add(parts, values, weight)
        return torch.stack(losses).sum(), parts

    def _passes_of(self, share: Share) -> Iterable[tuple[list[Any], float]]:
        """The passes of a share with their weights; if processes go in step, with some of weight zero at the end."""
        if not self._in_step:
            return self._passes.split(share)
        passes = list(self._passes.split(share))
        most = torch.tensor(len(passes), device=self.args.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return passes + [(passes[-1][0], 0.0)] * (int(most) - len(passes))

    def _losses(self, model: nn.Module, items: list[Any]) -> dict[str, torch.Tensor]:
        """The loss of one pass, checked, and its parts, detached."""
        with self.compute_loss_context_manager():
            outputs = model(**self._prepare_inputs(self._reading.collate(items)))
        if not torch.isfinite(outputs["loss"]):
            phase = "training" if model.training else "evaluation after"
            raise NonFiniteLossError(
                f"loss: expected a finite value, got {float(outputs['loss'].detach())} in {phase} step "
                f"{self.state.global_step + model.training}"
            )
        values = {name: value for name, value in outputs.items() if _is_scalar(value)}
        return {name: value if name == "loss" else value.detach() for name, value in values.items()}

    def _within_memory(self, run: Callable[[], T]) -> T:
        """What `run` gives, with smaller passes each time that it runs out of memory."""
        while True:
            try:
                return run()
            except RuntimeError as error:
                if self._in_step or not ran_out_of_memory(error):
                    raise
                if not self._passes.halve():
                    text = self._reading.num_tokens(self._passes.current[0])
                    raise torch.OutOfMemoryError(
                        f"training: memory does not suffice for one text of {text} tokens ({error}); "
                        "shorter texts (max_length) or fewer places (num_places) take less"
                    ) from None
            self.progress.say(
                f"training: out of memory in process {self.args.process_index}; goes on with at most "
                f"{self._passes.tokens:,} tokens at a time, the batch stays what it is"
            )

    def _sum_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of all processes; a parameter that none of them used keeps none."""
        if self.args.world_size == 1:
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        used = used.to(self.args.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    @torch.no_grad()
    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The loss of all held-out texts and its parts, as if they were one batch."""
        model = self.model.eval()
        self.progress.doing("evaluating")

        (inputs,) = dataloader  # all of it in one

        def evaluate() -> dict[str, torch.Tensor]:
            sums = dict[str, torch.Tensor]()
            for items, weight in self._passes_of(inputs["share"]):
                _add(sums, self._losses(model, items), weight)
            return sums

        sums = self._over_processes([self._within_memory(evaluate)])
        metrics = {f"eval_{name}": value for name, value in sums.items()}
        return EvalLoopOutput(None, None, metrics, len(self.eval_dataset))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the base, with the parts of the training loss beside it, and the minutes that the run has taken."""
        if "loss" in logs:
            parts, self._parts = self._parts, []
            means = {name: value / len(parts) for name, value in self._over_processes(parts).items()}
            logs = {**logs, **means}
        super().log({**logs, "minutes": self.progress.minutes}, *args, **kwargs)

    def _over_processes(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums by name; texts too short for a part leave it out, and count as zero."""
        from accelerate.utils import gather_object

        own = dict[str, torch.Tensor]()
        for one in parts:
            _add(own, one, 1.0)
        everybody = gather_object([{name: float(value) for name, value in own.items()}])
        names = dict.fromkeys(name for one in everybody for name in one)
        return {name: sum(one.get(name, 0.0) for one in everybody) for name in names}


def run_training(
    model: nn.Module,
    work_dir: Path,
    *,
    recipe: Recipe,
    run: Run,
    train: Dataset[Any],
    held_out: Dataset[Any],
    reading: Reading,
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
        reading: how items of these become batches, the keywords of the model's `forward`.
        mixed_precision: compute in bfloat16.
        trainer_class: a `RecipeTrainer` with other metrics.
        trainer_kwargs: further arguments of it.

    Returns:
        The metrics of the final evaluation, `eval_loss` among them, and the log of the whole run.

    Raises:
        NonFiniteLossError: the message says at which step, and where the last good checkpoint is.
        torch.OutOfMemoryError: a single text does not fit into memory.
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
        model,
        recipe,
        arguments,
        reading=reading,
        run=run,
        train_dataset=train,
        eval_dataset=held_out,
        **trainer_kwargs,
    )
    resumed = last_checkpoint(work_dir)
    if resumed is not None and trainer.is_world_process_zero():
        trainer.progress.say(f"training: goes on from {resumed}")
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        history = trainer.state.log_history
        last = next((entry for entry in reversed(history) if "eval_loss" in entry), None)
        metrics = last if last is not None and last["step"] == arguments.max_steps else trainer.evaluate()
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"{error}; {_what_is_kept(work_dir)}") from error
    except OSError as error:
        raise OSError(f"training: stopped by {error}; {_what_is_kept(work_dir)}") from error
    except KeyboardInterrupt:
        if trainer.is_world_process_zero():
            trainer.progress.close()
            trainer.progress.say(
                f"training: interrupted after step {trainer.state.global_step}; {_what_is_kept(work_dir)}"
            )
        raise
    finally:
        trainer.progress.close()
    return {name: value for name, value in metrics.items() if name.startswith("eval_")}, trainer.state.log_history


def _arguments(
    work_dir: Path, recipe: Recipe, run: Run, num_texts: int, mixed_precision: bool, on_cpu: bool
) -> TrainingArguments:
    """Recipe and run in the Trainer's words."""
    steps = run.steps or math.ceil(num_texts / recipe.batch_size) * recipe.epochs
    eval_every = run.eval_every or max(1, steps // 10)
    return TrainingArguments(
        output_dir=str(work_dir),
        per_device_train_batch_size=recipe.batch_size,  # unread: the loaders are the trainer's own
        max_steps=steps,
        learning_rate=recipe.learning_rate,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip_norm if recipe.clip_value is None else 0.0,
        bf16=mixed_precision,
        use_cpu=on_cpu,
        seed=run.seed,
        logging_steps=min(run.log_every, eval_every),
        logging_first_step=True,  # a sign of life
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=eval_every,
        save_steps=eval_every,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to=list(run.report_to),
        run_name=work_dir.name,
        **({} if run.optimizer == "adamw" else {"optim": _OPTIMIZER_OF[_found(run.optimizer)]}),
    )


def check_packages(run: Run) -> None:
    """Raise RuntimeError, with what to install, if a run asks for a package that is not there."""
    for name in (run.optimizer, *run.report_to):
        _found(name)


def _found(name: str) -> str:
    """The first package there of those that can do what a run asks for; empty if it needs none."""
    packages = _PACKAGES.get(name, ())
    found = next((package for package in packages if importlib.util.find_spec(package)), "")
    if packages and not found:
        raise RuntimeError(
            f"{name} needs the package {' or '.join(packages)}: pip install 'specdec-triton[{name.replace('_', '-')}]'"
        )
    return found


def _passes(recipe: Recipe, run: Run, reading: Reading, num_ranks: int) -> Passes:
    """In how many passes a process runs its share: as many as the run says, or as few as a limit of tokens allows."""
    share = math.ceil(recipe.batch_size / num_ranks)
    if run.accumulate is None:
        return Passes(reading.num_tokens, texts=share, tokens=TOKENS_PER_PASS)
    return Passes(reading.num_tokens, texts=math.ceil(share / run.accumulate), tokens=None)


def last_checkpoint(work_dir: Path) -> Path | None:
    """The newest checkpoint in `work_dir` that was written to its end."""
    return next(reversed(_complete_checkpoints(work_dir)), None)


def _complete_checkpoints(work_dir: Path) -> list[Path]:
    """Those that were written to their end, oldest first."""
    complete = [path.parent for path in work_dir.glob(f"checkpoint-*/{_COMPLETE}")]
    return sorted(complete, key=lambda path: int(path.name.split("-")[1]))


def forget_checkpoints(work_dir: Path) -> None:
    """Remove the checkpoints of a run that has ended."""
    for path in work_dir.glob("checkpoint-*"):
        shutil.rmtree(path)


def _what_is_kept(work_dir: Path) -> str:
    kept = last_checkpoint(work_dir)
    if kept is None:
        return "no checkpoint was written yet"
    return f"the last good checkpoint is {kept}, from which --resume (resume=True) goes on"


def _add(sums_: dict[str, torch.Tensor], values: Mapping[str, torch.Tensor], weight: float) -> None:
    """Add weighted values to sums by name."""
    for name, value in values.items():
        sums_[name] = sums_[name] + value * weight if name in sums_ else value * weight


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
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # the random numbers of every process are part of it
        if state.is_world_process_zero and args.output_dir is not None:
            work_dir = Path(args.output_dir)
            work_dir.joinpath(f"checkpoint-{state.global_step}", _COMPLETE).touch()
            for checkpoint in _complete_checkpoints(work_dir)[:-_NUM_CHECKPOINTS]:
                shutil.rmtree(checkpoint)
