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
    from transformers import PreTrainedTokenizerBase

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
        "--drafter", default="none", help="a kind (none, prompt_lookup), a folder or a hub id; with --model tiny also "
        "medusa or draft_model (default: %(default)s)",
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

    train = commands.add_parser("train-tiny", help="train the bundled model and its drafters anew")
    train.add_argument(
        "--output", type=Path, required=True, help="folder that receives target/, medusa/ and draft_model/"
    )
    train.add_argument("--work-dir", type=Path, help="checkpoints; a run started again resumes (default: OUTPUT/work)")
    train.add_argument("--num-steps", type=int, help="training steps of the target (default: the recipe's)")
    train.set_defaults(run=_train_tiny)
    return parser


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
    from specdec.tiny import TINY_FOLDER, tiny_drafter

    _hide_progress_of_loading()
    _check_positive(options, "max_new_tokens")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    source, drafter = options.model, options.drafter
    if source == "tiny":
        source = str(TINY_FOLDER / "target")
        if drafter in ("medusa", "draft_model"):
            drafter = str(tiny_drafter(drafter))
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


def _train_tiny(options: argparse.Namespace) -> int:
    try:
        import accelerate  # noqa: F401 - what transformers' Trainer needs
    except ImportError:
        raise RuntimeError("train-tiny needs accelerate: pip install 'specdec-triton[train]'") from None
    from specdec.training.tiny import train_tiny
    from specdec.training.tiny_target import TinyTargetRecipe

    recipe = TinyTargetRecipe() if options.num_steps is None else TinyTargetRecipe(num_steps=options.num_steps)
    report = train_tiny(options.output, options.work_dir or options.output / "work", target_recipe=recipe)
    print(json.dumps(report, indent=2))
    return 0


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
