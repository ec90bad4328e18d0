"""A GGUF file to a folder as transformers writes it: weights in float16, tokenizer with its chat template.

Dequantising is a product and a sum per weight, each rounded once to float32 (the package `gguf`, on NumPy), and the
cast to float16 rounds to nearest: every machine gets the same weights, which `hash_of_weights` proves.
"""

import contextlib
import hashlib
import importlib.util
import io
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.bundled.wheel import say

__all__ = ["WEIGHTS", "check_can_convert", "convert", "hash_of_weights"]

WEIGHTS = "model.safetensors"
_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path")


def check_can_convert(name: str) -> None:
    """Raise RuntimeError if the package that reads GGUF files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(f"{name} needs gguf to be converted, once: pip install 'specdec-triton[chat]'")


def convert(name: str, gguf: Path, folder: Path) -> None:
    """Write model and tokenizer to a folder.

    Args:
        name: of the model, for what is shown.
        gguf: a model of LLaMA's architecture with the tokenizer of SmolLM2.
        folder: exists; receives the files.
    """
    check_can_convert(name)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    say(f"{name}: converting {gguf.name}, about half a minute")
    # transformers shows its progress without asking where to
    hide = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with hide:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # one that came from GGUF takes itself for quantised and is not saved
        config = {key: value for key, value in loaded.config.to_dict().items() if key not in _OF_THE_FILE}
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.to(torch.float16).save_pretrained(folder)
    # The file names its splitting of text ("smollm"), which transformers does not read: digits stand alone, so that the
    # spaces in front of a number stay together.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it private


def hash_of_weights(file: Path) -> str:
    """sha256 in hexadecimal digits of the tensors in a safetensors file: by name, in order, dtype, shape and bytes."""
    digest = hashlib.sha256()
    with safe_open(file, "pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
