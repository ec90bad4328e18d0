"""One of the processes of test_runs.py: trains a small drafter, and may kill itself on the way.

Arguments: folder for `out` and `work`, where to die (a key of `DEATHS`, or "nowhere") and settings of the run as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from lib.families import build_model
from lib.objectives import samples
from specdec.models.target.sharding import shard_layers_
from specdec.training.data import Texts
from specdec.training.objectives.recipe import Run
from specdec.training.runs import trainer
from specdec.training.runs.probe import TauProbe
from specdec.training.train import train_drafter

PROBE = TauProbe(num_prompts=2, prompt_tokens=8, new_tokens=6)
RUN = {"steps": 6, "batch_size": 4, "learning_rate": 1e-2, "eval_every": 2, "log_every": 1}


def texts():
    """Texts of many lengths; each begins with a prompt longer than any head looks ahead."""
    return [sample for index in range(7) for sample in samples(2, 12 + 3 * index, prompt=5, seed=index)]


def train(folder, *, resume=False, model=None, data=None, probe=None, **run):
    """The run that every process makes; further keywords change its `RUN`."""
    return train_drafter(
        "medusa",
        build_model("llama") if model is None else model,
        Texts(texts() if data is None else data, 0.2),
        folder / "out",
        settings={"num_heads": 2},
        run=Run(**{**RUN, **run}),
        work_dir=folder / "work",
        resume=resume,
        probe=TauProbe(num_prompts=0) if probe is None else probe,
    )


def _die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_step_5():
    """Between the gradients of a step and its end."""
    learn = trainer.RecipeTrainer._learn

    def spoilt(self, *args):
        result = learn(self, *args)
        if self.state.global_step == 4:
            _die()
        return result

    trainer.RecipeTrainer._learn = spoilt


def _die_in_checkpoint_4():
    """After the weights of a checkpoint and before its optimiser."""
    save = trainer.RecipeTrainer._save_optimizer_and_scheduler

    def spoilt(self, folder):
        (_die if self.state.global_step == 4 else save)(self, folder)

    trainer.RecipeTrainer._save_optimizer_and_scheduler = spoilt


DEATHS = {"step": _die_in_step_5, "checkpoint": _die_in_checkpoint_4}

if __name__ == "__main__":
    torch.set_num_threads(1)
    changes = json.loads(sys.argv[3])
    if changes.pop("sharded", False):
        model = build_model("llama")
        shard_layers_(model, model.model.layers, torch.device("cpu"))
        changes |= {"model": model, "probe": PROBE}
    if sys.argv[2] in DEATHS:
        DEATHS[sys.argv[2]]()
    train(Path(sys.argv[1]), **changes)
