"""The short trainings behind the papers' ablations (`bench/claims/runs.py`), one after the other.

    python -m specdec.bench.paper_runs --target MODEL --data own.jsonl --output FOLDER
    python -m specdec.bench.paper_runs ... --foreign foreign.jsonl --rewritten rewritten.jsonl
    python -m specdec.bench.paper_runs ... --seeds 0 1 2 --only short-hydra short-hydra-teacher

What FOLDER holds is left alone, and a run that was interrupted goes on where it stopped, so that the command can be
given again until all is there. The first seed's drafter is FOLDER/NAME, the others' are FOLDER/NAME.seed1, .... What
the target says about the texts is kept where `specdec train-smollm2 --output FOLDER` keeps it, 1.2 kB per token of a
target of width 576.
"""

import argparse
import sys
import time
from pathlib import Path

from specdec.bench.claims.runs import SHORT_RUNS, ShortRun
from specdec.commands.common.options import load_target
from specdec.models.target.target import Target
from specdec.training.data import Texts
from specdec.training.objectives.recipe import Run
from specdec.training.runs.probe import TauProbe
from specdec.training.train import train_drafter

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing; returns the exit status."""
    options = _options(arguments)
    model, tokenizer = load_target(options.target, options)
    target = Target(model)
    runs = [(name, SHORT_RUNS[name], seed) for seed in options.seeds for name in options.only]
    for number, (name, run, seed) in enumerate(runs, start=1):
        output = options.output / (name if seed == options.seeds[0] else f"{name}.seed{options.seeds.index(seed)}")
        source = {"own": options.data, "foreign": options.foreign, "rewritten": options.rewritten}[run.texts]
        if output.exists() or source is None:
            why = "there" if output.exists() else f"no --{run.texts}"
            print(f"{number} of {len(runs)}: {output.name}: {why}", flush=True)
            continue
        texts = Texts(source, options.held_out, tokenizer, options.max_length)
        begin = time.perf_counter()
        report = _train(run, seed, target, texts, output, options)
        told = f"tau {report['tau']:.2f}, loss {report['held_out_loss']:.3f}"
        print(
            f"{number} of {len(runs)}: {output.name}: {told}, {(time.perf_counter() - begin) / 60:.1f} min", flush=True
        )
    return 0


def _train(
    run: ShortRun, seed: int, target: Target, texts: Texts, output: Path, options: argparse.Namespace
) -> dict[str, float]:
    """One training; its report."""
    return train_drafter(
        run.kind,
        target,
        texts,
        output,
        settings=run.settings,
        run=Run(
            steps=options.steps,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            eval_every=max(1, options.steps // 2),
            seed=seed,
            num_places=options.places,
            num_candidates=options.candidates,
            mixed_precision=options.mixed_precision,
        ),
        probe=TauProbe(num_prompts=4, new_tokens=32),
        resume=True,
        states=options.output / "work" / "states",
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="specdec.bench.paper_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="a folder, a hub id or a name that ships, such as tiny")
    parser.add_argument("--data", type=Path, required=True, help="texts that the target wrote (docs/training.md)")
    parser.add_argument("--foreign", type=Path, help="texts that others wrote; without, runs on them are left out")
    parser.add_argument("--rewritten", type=Path, help="the target's answers to the prompts of --foreign")
    parser.add_argument("--held-out", type=float, default=0.02, help="part of the texts (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the drafters by name")
    parser.add_argument("--only", nargs="+", choices=tuple(SHORT_RUNS), default=list(SHORT_RUNS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="one training of each per seed")
    parser.add_argument("--steps", type=int, default=400, help="of every run (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of every run (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=512, help="tokens at which texts are cut off")
    parser.add_argument("--places", type=int, help="places of a text that a step learns from (default: all)")
    parser.add_argument("--candidates", type=int, help="tokens that the laws of a step are over (default: all)")
    mixed = "compute in bfloat16 with weights in float32, also for a float32 target"
    parser.add_argument("--mixed-precision", action="store_true", default=None, help=mixed)
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
