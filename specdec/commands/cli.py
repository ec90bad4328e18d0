"""The `specdec` command."""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdec.drafting.base import Drafter
    from specdec.loop.rules import AcceptanceStats
    from specdec.models.target.target import Target

__all__ = ["main"]

_CHAT_TEMPLATE = "Jinja file for conversations (default: the tokenizer's)"


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
    _add_decoding(generate, max_new_tokens=128)
    generate.add_argument("--prompt", required=True, help="text to complete; '-' reads standard input")
    generate.add_argument("--json", action="store_true", help="print tokens, text and statistics as JSON")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk with a model; accepted draft tokens are in colour")
    _add_decoding(chat, max_new_tokens=512)
    chat.add_argument("--system", help="message that the conversation begins with")
    chat.add_argument("--chat-template", type=Path, help=_CHAT_TEMPLATE)
    chat.set_defaults(run=_chat)

    tune = commands.add_parser("tune", help="measure which part of a draft tree is fastest here; a file for --tree")
    _add_pair(tune)
    tune.add_argument("--output", type=Path, required=True, help="JSON file that receives the plan")
    tune.add_argument("--prompt", action="append", help="text to measure acceptance on; may be repeated (default: "
                      "texts that the target writes itself)")  # fmt: skip
    tune.add_argument("--batch-size", type=int, default=1, help="rows decoded together (default: %(default)s)")
    tune.add_argument("--context", type=int, help="tokens of text per row (default: 512, or half of a smaller context)")
    tune.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (default: %(default)s)")
    tune.set_defaults(run=_tune)

    _add_training(commands)
    return parser


def _add_pair(parser: argparse.ArgumentParser) -> None:
    """Options that name a target, a drafter and its tree."""
    parser.add_argument("--model", required=True, help="target: a folder, a hub id, or 'tiny', the bundled model")
    parser.add_argument(
        "--drafter", default="none", help="a kind without weights (none, prompt_lookup, lookahead), a folder or a hub "
        "id; with --model tiny also any bundled drafter, such as medusa (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tree", help="preset name, JSON file, k_config such as 4,2,2, length of a chain, or auto, which measures"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU"
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")


def _add_decoding(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Options of the commands that decode."""
    _add_pair(parser)
    parser.add_argument(
        "--acceptance", choices=("auto", "greedy", "naive", "rejection", "traversal", "typical"), default="auto",
        help="which drafted tokens are kept; all but typical are lossless (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--do-sample", action="store_true", help="sample, with the model's own settings where none is given here; "
        "without this and the next three the most probable tokens are taken",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="implies --do-sample; 0 takes the most probable tokens")
    parser.add_argument("--top-p", type=float, help="implies --do-sample")
    parser.add_argument("--top-k", type=int, help="implies --do-sample; 0 keeps all tokens")
    parser.add_argument("--seed", type=int, help="of sampling: the same seed gives the same text")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help="default: %(default)s")


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
    parser.add_argument("--chat-template", type=Path, help=_CHAT_TEMPLATE)


def _demo(options: argparse.Namespace) -> int:
    from specdec.commands.demo import run_demo

    _hide_progress_of_loading()
    _check_positive(options, "max_new_tokens", "repeats")
    return 0 if run_demo(max_new_tokens=options.max_new_tokens, repeats=options.repeats, as_json=options.json) else 1


def _generate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from specdec.commands.text import CompletionStream, describe_run
    from specdec.generation.generate import SpecDecodeOutput, generate

    _check_positive(options, "max_new_tokens")
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    target, drafter, tokenizer = _load_for_decoding(options)
    prompt = tokenizer(text, return_tensors="pt").input_ids.long()
    if prompt.numel() == 0:
        raise ValueError("--prompt: expected at least one token, got an empty text")
    console = Console(highlight=False)
    output = generate(
        target,
        drafter,
        prompt.to(target.device),
        streamer=None if options.json else CompletionStream(console, tokenizer, show_prompt=True),
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        return_dict_in_generate=True,
        **_sampling(options),
    )
    assert isinstance(output, SpecDecodeOutput)
    assert output.stats is not None
    tokens = output.sequences[0, prompt.shape[1] :].tolist()
    if options.json:
        print(json.dumps(_record(tokens, output.stats, tokenizer)))
        return 0
    place = f"{drafter.kind}, {target.device}, {str(target.dtype).removeprefix('torch.')}"
    console.print(f"\n{describe_run(len(tokens), output.stats)} ({place})", style="dim")
    return 0


def _record(tokens: list[int], stats: "AcceptanceStats", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """One generation for machines; `tau` is null when the first token ended the text."""
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "tau": stats.tau if stats.num_target_passes else None,
        "acceptance_at_depth": stats.acceptance_at_depth,
        "num_target_passes": stats.num_target_passes,
        "lossless": stats.lossless,
        "times_ms": stats.times_ms,
    }


def _chat(options: argparse.Namespace) -> int:
    from rich.console import Console

    from specdec.commands.chat import Chat, run_chat

    _check_positive(options, "max_new_tokens")
    template = options.chat_template.read_text() if options.chat_template else None
    target, drafter, tokenizer = _load_for_decoding(options)
    chat = Chat(
        target, drafter, tokenizer, system=options.system, chat_template=template,
        max_new_tokens=options.max_new_tokens, seed=options.seed, **_sampling(options),
    )  # fmt: skip
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with contextlib.suppress(ImportError):
            pass
    console = Console(highlight=False)
    console.print(f"{options.model} with {drafter.kind}; /reset begins anew, /exit leaves", style="dim")
    run_chat(chat, console, lambda: input("> " if is_interactive else ""))
    return 0


def _tune(options: argparse.Namespace) -> int:
    from specdec.tuning.measure import tune

    _check_positive(options, "max_new_tokens", "batch_size")
    target, drafter, tokenizer = _load_for_decoding(options)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0].long() for text in options.prompt or ()]
    plan = tune(
        target,
        drafter,
        prompts or None,
        batch_size=options.batch_size,
        context=options.context or min(512, target.max_positions // 2),
        max_new_tokens=options.max_new_tokens,
    )
    plan.save(options.output)
    print(plan)
    return 0


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """How tokens are chosen, as settings of `generate`."""
    names = ("temperature", "top_p", "top_k")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    do_sample = (options.do_sample or bool(given)) and options.temperature != 0
    return {"do_sample": do_sample, "acceptance": options.acceptance, **(given if do_sample else {})}


def _train(options: argparse.Namespace) -> int:
    _check_can_train("train")
    from specdec.training.data import Texts
    from specdec.training.recipe import Run
    from specdec.training.train import train_drafter

    target, tokenizer = _load_target(options.target, options)
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

    target, tokenizer = _load_target(options.target, options)
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
    if importlib.util.find_spec("accelerate") is None:  # transformers' Trainer needs it
        raise RuntimeError(f"{command} needs accelerate: pip install 'specdec-triton[train]'")


def _load_for_decoding(options: argparse.Namespace) -> tuple["Target", "Drafter", "PreTrainedTokenizerBase"]:
    """What a command that decodes names."""
    from specdec.drafters.load import load_drafter
    from specdec.models.target.target import Target

    model, tokenizer = _load_target(options.model, options)
    target = Target(model)
    drafter = load_drafter(_bundled(options.model, options.drafter), target, tree=_tree(options.tree))
    return target, drafter, tokenizer


def _load_target(target: str, options: argparse.Namespace) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The target on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _hide_progress_of_loading()
    rank = os.environ.get("LOCAL_RANK", "0")  # set by torchrun
    device = options.device or (f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    source = _target_folder(target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(source)


def _target_folder(target: str) -> str:
    """What 'tiny' stands for."""
    from specdec.bundled.load import TINY_FOLDER

    return str(TINY_FOLDER / "target") if target == "tiny" else target


def _bundled(target: str, drafter: str) -> str:
    """With the bundled target, its drafters go by their names."""
    from specdec.bundled.load import bundled_drafters, tiny_drafter

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
