"""The `specdec` command."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdec.decoder import DecodeResult

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Expected errors print one line, not a traceback.

    Heavy imports wait until a command needs them, so that `specdec --help` is quick.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (TypeError, ValueError, OSError, NotImplementedError, RuntimeError) as error:
        if options.verbose:
            raise
        print(f"specdec: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Tree speculative decoding for Hugging Face models.")
    parser.add_argument("--verbose", action="store_true", help="log decisions and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the bundled model with every bundled drafter: text, then a table")
    demo.add_argument("--max-new-tokens", type=int, default=128, help="new tokens per prompt (default: %(default)s)")
    demo.add_argument("--repeats", type=int, default=3, help="timed repeats; medians are shown (default: %(default)s)")
    demo.add_argument("--json", action="store_true", help="print the results as JSON")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="complete a prompt")
    generate.add_argument("--model", required=True, help="target: a folder, a hub id, or 'tiny', the bundled model")
    generate.add_argument(
        "--drafter", default="none", help="a kind without weights (none, prompt_lookup, lookahead), a folder or a hub "
        "id; with --model tiny also any bundled drafter, such as medusa (default: %(default)s)",
    )  # fmt: skip
    generate.add_argument("--prompt", required=True, help="text to complete; '-' reads standard input")
    generate.add_argument("--tree", help="preset name, JSON file, k_config such as 4,2,2, or length of a chain")
    generate.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    generate.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU"
    )
    generate.add_argument("--device", help="default: cuda if there is one, else cpu")
    generate.add_argument("--json", action="store_true", help="print tokens, text and statistics as JSON")
    generate.set_defaults(run=_generate)

    _add_training(commands)
    return parser


def _add_training(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The commands train, distill and train-tiny."""
    train = commands.add_parser("train", help="train a drafter of any kind for a target")
    train.add_argument("--drafter", required=True, metavar="KIND", help="medusa, hydra, hydra++, eagle, ...")
    _add_target(train)
    train.add_argument(
        "--data", type=Path, required=True, help="texts: .jsonl (see docs/training.md) or .pt of token ids"
    )
    train.add_argument("--held-out", help="texts to evaluate on: a file, or a part of the data (default: 0.05)")
    train.add_argument("--output", type=Path, required=True, help="folder that receives the drafter")
    train.add_argument("--work-dir", type=Path, help="checkpoints (default: a hidden folder beside OUTPUT)")
    train.add_argument("--resume", action="store_true", help="go on with the interrupted run in the work directory")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="a setting of the kind, such as num_heads=3; values are JSON or text; may be repeated",
    )  # fmt: skip
    train.add_argument("--tree", help="as for generate; saved with the drafter, and used to measure tau")
    train.add_argument("--labels", choices=("text", "target"), default="text", help="what drafters guess: the text, or "
                       "the target's most probable token at each place (default: %(default)s)")  # fmt: skip
    for name, kind, about in (
        ("--epochs", int, "passes over the texts"),
        ("--steps", int, "optimiser steps, instead of epochs"),
        ("--batch-size", int, "texts per step"),
        ("--accumulate", int, "parts in which a batch is run, to save memory"),
        ("--learning-rate", float, "peak of the schedule"),
        ("--max-length", int, "tokens at which texts are cut off"),
        ("--eval-every", int, "steps between evaluations, which are checkpoints"),
        ("--seed", int, "of the order of the texts and of all noise"),
    ):
        train.add_argument(name, type=kind, help=about)
    train.set_defaults(run=_train)

    distill = commands.add_parser("distill", help="let the target write the texts that drafters learn from")
    _add_target(distill)
    distill.add_argument("--data", type=Path, required=True, help="prompts: .jsonl with prompt, text or conversations")
    distill.add_argument("--output", type=Path, required=True, help=".jsonl file; lines that are there are kept")
    distill.add_argument("--max-new-tokens", type=int, default=512, help="default: %(default)s")
    distill.add_argument("--temperature", type=float, action="append", help="may be repeated: batches take turns "
                         "(default: 0, greedy)")  # fmt: skip
    distill.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    distill.add_argument("--drafter", default="none", help="as for generate: speeds the writing up")
    distill.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    distill.set_defaults(run=_distill)

    tiny = commands.add_parser("train-tiny", help="train the bundled model and its drafters anew")
    tiny.add_argument("--output", type=Path, required=True, help="folder that receives target/ and the drafters")
    tiny.add_argument("--work-dir", type=Path, help="checkpoints; a run started again resumes (default: OUTPUT/work)")
    tiny.add_argument("--only", action="append", metavar="PART", help="one part, such as medusa; may be repeated")
    tiny.add_argument("--num-steps", type=int, help="training steps of the target (default: the recipe's)")
    tiny.set_defaults(run=_train_tiny)


def _add_target(parser: argparse.ArgumentParser) -> None:
    """Options that name the target of a training command."""
    parser.add_argument("--target", required=True, help="a folder, a hub id, or 'tiny', the bundled model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--chat-template", type=Path, help="Jinja file for conversations (default: the tokenizer's)")


def _demo(options: argparse.Namespace) -> int:
    from specdec.demo import run_demo

    _hide_progress_of_loading()
    _check_positive(options, "max_new_tokens", "repeats")
    return 0 if run_demo(max_new_tokens=options.max_new_tokens, repeats=options.repeats, as_json=options.json) else 1


def _generate(options: argparse.Namespace) -> int:
    import torch
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec.checkpoints import load_drafter
    from specdec.decoder import Decoder
    from specdec.demo import stream_completion
    from specdec.models.target import Target

    _hide_progress_of_loading()
    _check_positive(options, "max_new_tokens")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    source, drafter = _target_folder(options.model), _bundled(options.model, options.drafter)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt

    tokenizer = AutoTokenizer.from_pretrained(source)
    prompt = tokenizer(text, return_tensors="pt").input_ids[0].long()
    if prompt.numel() == 0:
        raise ValueError("--prompt: expected at least one token, got an empty text")
    target = Target(AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval())
    stops = target.model.generation_config.eos_token_id
    stop_tokens = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
    decoder = Decoder(target, load_drafter(drafter, target, tree=_tree(options.tree)))
    if options.json:
        result = decoder.decode([prompt], options.max_new_tokens, stop_tokens=stop_tokens)
        print(json.dumps(_record(result, tokenizer)))
        return 0
    console = Console(highlight=False)
    result = stream_completion(
        console, decoder, tokenizer, prompt, max_new_tokens=options.max_new_tokens, stop_tokens=stop_tokens
    )
    tokens, stats = result.tokens[0], result.stats
    speed = len(tokens) / (sum(stats.times_ms.values()) / 1e3)
    console.print(
        f"\n{len(tokens)} tokens in {stats.num_target_passes} target passes, tau {stats.tau:.2f}, {speed:.0f} tok/s "
        f"({decoder.drafter.kind}, {device}, {str(dtype).removeprefix('torch.')})",
        style="dim",
    )
    return 0


def _record(result: "DecodeResult", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """One generation for machines; `tau` is null when the first token ended the text."""
    stats = result.stats
    return {
        "text": tokenizer.decode(result.tokens[0], skip_special_tokens=True),
        "tokens": result.tokens[0],
        "tau": stats.tau if stats.num_target_passes else None,
        "acceptance_at_depth": stats.acceptance_at_depth,
        "num_target_passes": stats.num_target_passes,
        "lossless": stats.lossless,
        "times_ms": stats.times_ms,
    }


def _train(options: argparse.Namespace) -> int:
    _check_can_train("train")
    from specdec.training.data import Texts
    from specdec.training.recipes import Run
    from specdec.training.train import train_drafter

    target, tokenizer = _load_target(options)
    names = ("epochs", "steps", "batch_size", "accumulate", "learning_rate", "eval_every", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    texts = Texts(
        options.data,
        0.05 if options.held_out is None else _number(options.held_out),
        tokenizer,
        options.max_length,
        options.chat_template.read_text() if options.chat_template else None,
    )
    report = train_drafter(
        options.drafter,
        target,
        texts,
        options.output,
        settings=dict(_setting(text) for text in options.settings),
        run=Run(**given),
        labels=options.labels,
        tree=_tree(options.tree),
        work_dir=options.work_dir,
        resume=options.resume,
    )
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        print(json.dumps(report, indent=2))
    return 0


def _distill(options: argparse.Namespace) -> int:
    from specdec.training.distill import distill

    target, tokenizer = _load_target(options)
    counts = distill(
        target,
        tokenizer,
        options.data,
        options.output,
        max_new_tokens=options.max_new_tokens,
        temperatures=options.temperature or (0.0,),
        batch_size=options.batch_size,
        drafter=_bundled(options.target, options.drafter),
        chat_template=options.chat_template.read_text() if options.chat_template else None,
        seed=options.seed,
    )
    print(json.dumps(counts))
    return 0


def _train_tiny(options: argparse.Namespace) -> int:
    _check_can_train("train-tiny")
    from specdec.training.tiny import train_tiny
    from specdec.training.tiny_target import TinyTargetRecipe

    _hide_progress_of_loading()
    recipe = TinyTargetRecipe() if options.num_steps is None else TinyTargetRecipe(num_steps=options.num_steps)
    work_dir = options.work_dir or options.output / "work"
    report = train_tiny(options.output, work_dir, only=options.only, target_recipe=recipe)
    print(json.dumps(report, indent=2))
    return 0


def _check_can_train(command: str) -> None:
    try:
        import accelerate  # noqa: F401 - what transformers' Trainer needs
    except ImportError:
        raise RuntimeError(f"{command} needs accelerate: pip install 'specdec-triton[train]'") from None


def _load_target(options: argparse.Namespace) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The target of a training command on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _hide_progress_of_loading()
    rank = os.environ.get("LOCAL_RANK", "0")  # set by torchrun
    device = options.device or (f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    source = _target_folder(options.target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(source)


def _target_folder(target: str) -> str:
    """What 'tiny' stands for."""
    from specdec.tiny import TINY_FOLDER

    return str(TINY_FOLDER / "target") if target == "tiny" else target


def _bundled(target: str, drafter: str) -> str:
    """With the bundled target, its drafters go by their names."""
    from specdec.tiny import bundled_drafters, tiny_drafter

    return str(tiny_drafter(drafter)) if target == "tiny" and drafter in bundled_drafters() else drafter


def _setting(text: str) -> tuple[str, Any]:
    """A --set option: JSON where it is JSON, else text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--set: expected KEY=VALUE, got {text!r}")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed


def _number(text: str) -> float | str:
    """A number where it is one, else text."""
    try:
        return float(text)
    except ValueError:
        return text


def _tree(text: str | None) -> str | int | tuple[int, ...] | None:
    """What --tree means: a number, numbers with commas, or a name."""
    if text is None or os.path.exists(text):
        return text
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers if "," in text else numbers[0]


def _hide_progress_of_loading() -> None:
    """Keep transformers' progress bars out of logs and pipes."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(options, name)}")


if __name__ == "__main__":
    sys.exit(main())
