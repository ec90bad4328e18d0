"""Checkpoint files as others published them: which files of a folder hold the tensors, and the hub's folders.

Tensors are read when they are asked for: names come from the headers, so telling a 14 GB model from draft heads costs
nothing, and of a Medusa-2 model only the heads are read. Pickles may hold nothing but tensors.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

__all__ = ["MASK_EMBEDDING", "MASK_TOKEN", "TensorFiles", "download", "read_config", "tensor_files"]

MASK_EMBEDDING, MASK_TOKEN = "mask_embedding", "mask_embedding.token"
"""Names that the content of a `mask_embedding.pt` beside a checkpoint goes by: [C], and an int64 number."""

# In this order; a folder with draft heads may hold other weights as well.
_HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt")
_MODEL_FILES = tuple(name + end for name in ("model.safetensors", "pytorch_model.bin") for end in (".index.json", ""))
_MASK_FILE = f"{MASK_EMBEDDING}.pt"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_UNREADABLE = (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError)


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of one or several files by name, each read from disk when it is asked for, and then kept.

    Args:
        files: safetensors files, or pickles that hold a dict of tensors.

    Raises:
        ValueError: a file that is not readable as one of these, by name.
    """

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[str, Path] = {}
        self._read: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                if file.suffix == ".safetensors":
                    with safe_open(file, framework="pt") as opened:
                        names = list(opened.keys())
                else:
                    tensors = _unpickle(file)
                    self._read.update(tensors)
                    names = list(tensors)
            except _UNREADABLE as error:
                raise ValueError(f"{file}: expected a readable checkpoint, got {error}") from error
            self._where.update(dict.fromkeys(names, file))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._read:
            file = self._where[name]
            try:
                with safe_open(file, framework="pt") as opened:
                    self._read[name] = opened.get_tensor(name)
            except _UNREADABLE as error:
                raise ValueError(f"{file}: expected a readable tensor {name}, got {error}") from error
        return self._read[name]

    def put(self, file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add what was read of another file."""
        self._where.update(dict.fromkeys(tensors, file))
        self._read.update(tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def tensor_files(path: Path) -> TensorFiles:
    """The tensors of a file, or of the checkpoint in a folder.

    Raises:
        FileNotFoundError: a folder without a checkpoint, or one of whose shards is missing.
        ValueError: unreadable files, or several that could be meant.
    """
    if path.is_file():
        return TensorFiles([path])
    tensors, mask = _checkpoint(path), path / _MASK_FILE
    if mask.exists():
        tensors.put(mask, _mask_embedding(mask))
    return tensors


def _checkpoint(path: Path) -> TensorFiles:
    """The tensors of the checkpoint in a folder."""
    for name in (*_HEAD_FILES, *_MODEL_FILES):
        file = path / name
        if file.exists():
            return _sharded(file) if name.endswith(".json") else TensorFiles([file])
    others = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.name != _MASK_FILE)
    if not others:
        raise FileNotFoundError(f"drafter: expected a checkpoint ({', '.join(_SUFFIXES)}) in {path}, got none")
    if len(others) > 1:
        names = ", ".join(file.name for file in others)
        raise ValueError(
            f"drafter: expected one checkpoint in {path}, got {names}; name the file instead of the folder"
        )
    return TensorFiles(others)


def read_config(path: Path) -> dict[str, Any]:
    """The `config.json` in a folder, or beside a file; empty if there is none.

    Raises:
        ValueError: it is no JSON object.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def download(name: str) -> Path:
    """Fetch a repository's checkpoint from the hub, or find it in the local cache: its folder.

    Raises:
        FileNotFoundError: no such repository, or no connection and not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    def fetch(suffixes: tuple[str, ...]) -> Path:
        patterns = ["*.json", _MASK_FILE, *(f"*{suffix}" for suffix in suffixes)]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "tokenizer*", "vocab*"]))

    try:
        folder = fetch((".safetensors",))
        # many authors' repositories hold pickles alone
        return folder if any(folder.glob("*.safetensors")) else fetch(_SUFFIXES)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise FileNotFoundError(
            f"drafter: {name!r} is no folder here and not in the hub's cache, and the hub cannot be reached: {error}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"drafter: {name!r} is no folder here, and the hub does not give it: {error}"
        ) from error


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, mapped into memory where its format allows."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):  # files from before the zip format cannot be mapped
            raise
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError("something else than a dict of tensors")
    return dict(tensors)


def _mask_embedding(file: Path) -> dict[str, torch.Tensor]:
    """The embedding that masks have in the place of their token's, by its name, and the token where the file has it."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise ValueError(f"{file}: expected a readable embedding of the mask, got {error}") from error
    content = {"embedding": content} if isinstance(content, torch.Tensor) else content
    embedding = content.get("embedding") if isinstance(content, dict) else None
    if not isinstance(embedding, torch.Tensor):
        raise ValueError(f"{file}: expected a tensor, or one named 'embedding', got {type(content).__name__}")
    found = {MASK_EMBEDDING: embedding.flatten()}
    if content.get("mask_token_id") is not None:
        found[MASK_TOKEN] = torch.tensor(int(content["mask_token_id"]))
    return found


def _sharded(index: Path) -> TensorFiles:
    """The tensors of all shards that an index names."""
    try:
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [index.parent / name for name in sorted(set(shards.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: expected a JSON object with 'weight_map', got {error!r}") from error
    lacking = [file.name for file in files if not file.exists()]
    if lacking:
        raise FileNotFoundError(f"drafter: expected all shards of {index}, missing {', '.join(lacking)}")
    tensors = TensorFiles(files)
    absent = sorted(shards.keys() - set(tensors))
    if absent:
        raise ValueError(f"{index}: expected the tensors that it lists, missing {absent[:5]}")
    return tensors
