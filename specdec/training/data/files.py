"""Rows of a file, each with its place for messages."""

import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["data_hash", "rows_of"]


def data_hash(path: str | Path) -> str:
    """SHA-256 of what a file holds, in hex: what training.json knows its data by.

    Raises:
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data: expected a file, got {path}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a file of either form, each with its place for messages, such as `:12`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no such file, or a line is no JSON object.
    """
    if not path.exists():
        raise FileNotFoundError(f"data: expected a file, got {path}")
    return _token_rows(path) if path.suffix == ".pt" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Lines of a file with their place for messages; empty lines are skipped."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: expected a JSON object, got {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
                yield f":{number}", row


def _token_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of token ids in a `.pt` file."""
    try:
        rows = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: expected a readable file of token ids, got {error}") from error
    if isinstance(rows, torch.Tensor) and rows.ndim == 2:
        rows = list(rows)
    is_rows = isinstance(rows, list) and all(isinstance(row, torch.Tensor) and row.ndim == 1 for row in rows)
    if not is_rows or any(row.is_floating_point() for row in rows):
        raise ValueError(f"{path}: expected a [N, T] tensor of token ids or a list of 1-D ones")
    for index, row in enumerate(rows):
        yield f"[{index}]", {"tokens": row.tolist(), "prompt_length": 0}
