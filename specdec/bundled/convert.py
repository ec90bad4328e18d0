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
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.common.fetching import say

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
    say(f"{name}: converting {gguf.name}, about half a minute")
    # transformers shows its progress without asking where to
    hide = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with hide:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # one that came from GGUF takes itself for quantised and is not saved
        config = {key: value for key, value in loaded.config.to_dict().items() if key not in _OF_THE_FILE}
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.to(torch.float16).save_pretrained(folder)
    _tokenizer(gguf).save_pretrained(folder)
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it private


def _tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, built here: what transformers makes of one differs from release to release.

    Raises:
        ValueError: the file names another kind of tokenizer than SmolLM2's.
    """
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(file).fields

    def read(name: str) -> Any:
        field = fields.get(f"tokenizer.{name}")
        return None if field is None else field.contents()

    kind = read("ggml.model"), read("ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"gguf: expected the tokenizer ('gpt2', 'smollm'), got {kind} in {file.name}")
    tokens, merges = read("ggml.tokens"), [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(BPE({token: place for place, token in enumerate(tokens)}, merges))
    # "smollm": digits stand alone, so that the spaces in front of a number stay together
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    special = [
        token for token, type_ in zip(tokens, read("ggml.token_type"), strict=True) if type_ == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(special)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    places = {name: read(f"ggml.{place}_token_id") for name, place in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        chat_template=read("chat_template"),
        **{f"{name}_token": tokens[place] for name, place in places.items() if place is not None},
    )


def hash_of_weights(file: Path) -> str:
    """sha256 in hexadecimal digits of the tensors in a safetensors file: by name, in order, dtype, shape and bytes."""
    digest = hashlib.sha256()
    with safe_open(file, "pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
