"""The bundled tiny target and its drafters: real acceptance on any machine, with no download.

A LLaMA of five million parameters trained on the Python standard library, so it completes Python. It serves the demo,
the tests and the docs; `specdec train-tiny` makes it anew.
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from specdec.drafters.load import load_drafter
from specdec.drafting.base import Drafter
from specdec.models.target.target import Target

__all__ = ["TINY_FOLDER", "bundled_drafters", "load_tiny", "load_tiny_drafters", "tiny_drafter"]

TINY_FOLDER = Path(__file__).parent / "tiny"


def load_tiny(
    *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The bundled target, ready to decode, and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(TINY_FOLDER / "target", dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(TINY_FOLDER / "target")


def bundled_drafters() -> tuple[str, ...]:
    """Names of the trained drafters that are bundled, sorted."""
    return tuple(sorted(path.name for path in TINY_FOLDER.iterdir() if path.is_dir() and path.name != "target"))


def load_tiny_drafters(target: Target) -> dict[str, Drafter | None]:
    """Every drafter of the bundled target by name: plain decoding ("none"), those without weights, the trained ones."""
    names = ("prompt_lookup", "lookahead", *bundled_drafters())
    sources = {name: TINY_FOLDER / name if (TINY_FOLDER / name).exists() else name for name in names}
    return {"none": None, **{name: load_drafter(source, target) for name, source in sources.items()}}


def tiny_drafter(name: str) -> Path:
    """Folder of a bundled drafter: its kind, or the kind with its variant.

    Raises:
        ValueError: none of that name is bundled; the message lists those that are.
    """
    if name not in bundled_drafters():
        raise ValueError(f"kind: expected a bundled drafter ({', '.join(bundled_drafters())}), got {name!r}")
    return TINY_FOLDER / name
