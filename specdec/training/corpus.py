"""The corpus of the bundled tiny model: the Python standard library's own source (PSF licence).

It is on every machine that runs this package, so the recipe needs no download. One file in forty is held out.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["END_OF_TEXT", "Corpus", "TokenWindows", "read_standard_library", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_EVERY = 40

# Tests, generated tables and vendored packages teach little about how people write Python.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings",
        "pydoc_data", "lib2to3", "turtledemo", "ensurepip",
    }
)  # fmt: skip

# A newline and the indentation after it are one piece: indentation then costs one token per line.
_PIECES = r"(?:\r?\n)+ *| ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+| +|\s"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Source texts, split by file."""

    train: list[str]
    held_out: list[str]


def read_standard_library(root: Path | None = None) -> Corpus:
    """Read every `.py` file of the running interpreter's standard library, in sorted order.

    Args:
        root: folder to read; the standard library of this interpreter by default.

    Raises:
        FileNotFoundError: the folder has no Python source.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root)
    texts = []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if _SKIPPED_FOLDERS.isdisjoint(folders) and not any(name.startswith("config-") for name in folders):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                texts.append(text)
    if not texts:
        raise FileNotFoundError(f"root: expected a folder with .py files, got {root}")
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Corpus(train=texts, held_out=held_out)


def train_tokenizer(texts: list[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; every byte string can be encoded and decoded back exactly.

    Args:
        texts: documents to count pairs on.
        vocab_size: number of entries, the 256 bytes and `END_OF_TEXT` (id 0) included.
        model_max_length: context of the model that the tokenizer belongs to, in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


class TokenWindows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Equal windows cut from documents that are joined by the end-of-text token.

    Items are `{"input_ids": [window], "labels": [window]}`, int64; a causal LM shifts the labels itself.
    """

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerFast, window: int) -> None:
        ids: list[int] = []
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
            ids.append(tokenizer.eos_token_id)
            ids.extend(encoding.ids)
        if len(ids) < window:
            raise ValueError(f"texts: expected at least {window} tokens, got {len(ids)}")
        count = len(ids) // window
        self.windows = torch.tensor(ids[: count * window]).view(count, window)

    def __len__(self) -> int:
        return self.windows.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index]
        return {"input_ids": window, "labels": window}
