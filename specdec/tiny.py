"""The bundled tiny target and its drafters: real acceptance on any machine, with no download.

A LLaMA of five million parameters trained on the Python standard library, so it completes Python. It serves the demo,
the tests and the docs; `specdec train-tiny` makes it anew.
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

__all__ = ["TINY_FOLDER", "load_tiny", "tiny_drafter"]

TINY_FOLDER = Path(__file__).parent / "bundled"


def load_tiny(
    *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The bundled target, ready to decode, and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(TINY_FOLDER / "target", dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(TINY_FOLDER / "target")


def tiny_drafter(kind: str) -> Path:
    """Folder of the bundled drafter of this kind.

    Raises:
        ValueError: none of that kind is bundled; the message lists those that are.
    """
    folder = TINY_FOLDER / kind
    if not folder.is_dir() or kind == "target":
        bundled = sorted(path.name for path in TINY_FOLDER.iterdir() if path.is_dir() and path.name != "target")
        raise ValueError(f"kind: expected a bundled drafter ({', '.join(bundled)}), got {kind!r}")
    return folder
