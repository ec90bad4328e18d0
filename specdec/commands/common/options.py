"""Options that several commands share, and what they stand for."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from specdec.common.checks import check_at_least

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdec.drafting.base import Drafter
    from specdec.models.target.target import Target

    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

__all__ = ["add_chat_template", "add_decoding", "add_pair", "add_place", "add_target", "as_tree_option", "bundled"]
__all__ += ["chat_template_of", "check_positive", "given", "hide_progress_of_loading", "load_for_decoding"]
__all__ += ["load_target", "read_settings"]

_TARGETS = "a folder, a hub id, 'tiny', the bundled model, or 'smollm2', a chat model that is fetched once"


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Options that name a target, a drafter and its tree."""
    kinds = "a kind without weights (none, prompt_lookup, suffix, lookahead), a folder or a hub id"
    named = (
        "with --model tiny or smollm2 also a bundled drafter, such as medusa; several with + between them propose one "
        "tree together; auto takes what is at hand"
    )
    trees = "preset name, JSON file, k_config such as 4,2,2, length of a chain, or auto, which sizes it at every step"
    parser.add_argument("--model", required=True, help=f"target: {_TARGETS}")
    parser.add_argument("--drafter", default="none", help=f"{kinds}; {named} (default: %(default)s)")
    parser.add_argument("--tree", help=trees)
    setting = "a setting of the drafter, such as max_ngram=2; also kind=... and any_target=true; may be repeated"
    parser.add_argument("--drafter-set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    add_place(parser, ("float32", "float16", "bfloat16"))


def add_decoding(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Options of the commands that decode."""
    add_pair(parser)
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help="default: %(default)s")
    chunk = "prompt tokens that are read at a time; fewer take less memory"
    parser.add_argument("--prefill-chunk-size", type=int, metavar="N", help=chunk)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Options that name the target of a training command."""
    parser.add_argument("--target", required=True, help=_TARGETS)
    add_place(parser, ("float32", "bfloat16"))
    add_chat_template(parser)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """The option that names a chat template."""
    about = "for conversations: chatml, llama2, vicuna, or a Jinja file (default: the tokenizer's)"
    parser.add_argument("--chat-template", metavar="NAME", help=about)


def add_place(parser: argparse.ArgumentParser, dtypes: tuple[str, ...]) -> None:
    """Options of where a target is, and in which dtype."""
    parser.add_argument("--dtype", choices=dtypes, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError, by its name on the command line, for an option below 1."""
    check_at_least(1, {f"--{name.replace('_', '-')}": getattr(options, name) for name in names})


def chat_template_of(options: argparse.Namespace) -> str | None:
    """The text of --chat-template."""
    from specdec.training.data.chat_templates import chat_template_text

    return chat_template_text(options.chat_template) if options.chat_template else None


def as_tree_option(text: str | None) -> str | int | tuple[int, ...] | None:
    """What --tree means: a number, numbers with commas, or a name."""
    if text is None or os.path.exists(text):
        return text
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers if "," in text else numbers[0]


def read_settings(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """What an option of KEY=VALUE says: JSON where it is JSON, lists as tuples, else text.

    Raises:
        ValueError: another form, by the option's name.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{option}: expected KEY=VALUE, got {text!r}")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        settings[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return settings


def load_for_decoding(options: argparse.Namespace) -> "tuple[Target, Drafter, PreTrainedTokenizerBase]":
    """What a command that decodes names."""
    from specdec.models.target.target import Target
    from specdec.tuning.auto import load_drafter

    settings = read_settings("--drafter-set", options.drafter_set)
    for name, way in (("tree", "--tree"), ("source", "--drafter"), ("target", "--model")):
        if name in settings:
            raise ValueError(f"--drafter-set: expected a setting of the drafter, got {name}; {way} is for that")
    source = bundled(options.model, options.drafter)  # a wrong name is told before the target is read
    model, tokenizer = load_target(options.model, options)
    target = Target(model)
    drafter = load_drafter(source, target, tree=as_tree_option(options.tree), **settings)
    return target, drafter, tokenizer


def load_target(
    target: str, options: argparse.Namespace, *, is_sharded: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The target on its device, or its layers in parts over all processes, and its tokenizer."""
    import torch

    from specdec.bundled.load import load_model

    hide_progress_of_loading()
    rank = os.environ.get("LOCAL_RANK", "0")  # set by torchrun
    device = options.device or (f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    if not is_sharded:
        return load_model(target, dtype=dtype, device=device)
    from specdec.models.target.families import decoder_layers
    from specdec.models.target.sharding import shard_layers_

    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--target-sharding: expected several processes to share the target, got one; start with torchrun"
        )
    model, tokenizer = load_model(target, dtype=dtype, device="cpu")
    shard_layers_(model, decoder_layers(model.get_decoder()), torch.device(device))
    return model, tokenizer


def bundled(target: str, drafter: str) -> "str | list[str]":
    """With a target that goes by a name, its drafters do too; names with + between them are several."""
    from specdec.bundled.load import NAMED_MODELS
    from specdec.tuning.auto import split_names

    names = [drafter] if os.path.exists(drafter) else split_names(drafter)
    if target in NAMED_MODELS:
        names = [_bundled(target, name) for name in names]
    return names[0] if len(names) == 1 else names


def _bundled(target: str, drafter: str) -> str:
    from specdec.bundled.load import bundled_drafter, bundled_drafters
    from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS
    from specdec.tuning.auto import AUTO

    is_elsewhere = drafter in (*KINDS_WITHOUT_WEIGHTS, AUTO) or "/" in drafter or os.path.exists(drafter)
    if is_elsewhere and drafter not in bundled_drafters(target):
        return drafter
    return str(bundled_drafter(target, drafter))


def hide_progress_of_loading(*, on_terminals: bool = False) -> None:
    """Keep transformers' progress bars out of logs and pipes, and off terminals that show something better."""
    from transformers.utils import logging as transformers_logging

    if on_terminals or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
