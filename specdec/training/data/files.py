"""Rows of files and data sets, each with its place for messages.

A file is read by its name's ending: `.pt` holds token ids, a [N, T] tensor or a list of 1-D tensors; `.parquet` has a
row a text; anything else is JSON, gzipped or not, a row a line or one array of all rows (as ShareGPT is published).
What is no file but has the name of a data set, `owner/name`, comes from the hub: `owner/name:split` (by default
`train`), with a configuration as `owner/name/configuration:split`.
"""

import gzip
import hashlib
import importlib
import json
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.common.files import file_sha256

__all__ = ["data_hash", "hub_name", "rows_of"]

_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[^/]+))?")
_ENDINGS = (".json", ".jsonl", ".ndjson", ".parquet", ".pt", ".txt", ".csv", ".gz")
_ROWS_AT_A_TIME = 1024
_GZIP = b"\x1f\x8b"  # what every such file begins with

Row = Mapping[str, Any]


def data_hash(source: str | Path) -> str:
    """SHA-256, in hex, of what a file holds, or of the rows of a data set on the hub.

    Raises:
        FileNotFoundError: no such file or data set.
        ValueError: a folder.
        RuntimeError: a library is missing.
    """
    if not hub_name(source):
        return file_sha256(_file(source))
    digest = hashlib.sha256()
    for _, row in rows_of(source):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def hub_name(source: str | Path) -> re.Match[str] | None:
    """The name of a data set on the hub, with its parts `name`, `config` and `split`; None for all that is a file."""
    text = Path(source).as_posix()
    if Path(source).exists() or text.endswith(_ENDINGS):
        return None
    return _HUB_NAME.fullmatch(text)


def rows_of(source: str | Path, *, texts: bool = False) -> Iterator[tuple[str, Row]]:
    """Rows of a file or data set, each with its place for messages: `:12` is a line, `[12]` counts rows from 0.

    Args:
        source: a file, or a data set of the hub.
        texts: take a JSON text in the place of an object, as a row `{"prompt": text}`.

    Raises:
        FileNotFoundError: no such file or data set.
        ValueError: a folder, or a file that is not what its name's ending says; with the line, where there are any.
        RuntimeError: a library is missing.
    """
    if name := hub_name(source):
        return _hub_rows(name)
    path = _file(source)
    readers = {".pt": _token_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix)
    return _json_rows(path, texts) if reader is None else reader(path)


def _file(source: str | Path) -> Path:
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"data: expected a file, got the folder {path}")
    if not path.exists():
        raise FileNotFoundError(f"data: expected a file, or a data set of the hub as owner/name:split, got {path}")
    return path


def _json_rows(path: Path, texts: bool) -> Iterator[tuple[str, Row]]:
    """Rows of a file of JSON lines, of which empty ones are skipped, or of one JSON array."""
    with path.open("rb") as start:
        compressed = path.suffix == ".gz" or start.read(len(_GZIP)) == _GZIP
    try:
        with (gzip.open if compressed else open)(path, "rt", encoding="utf-8-sig") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for first, (number, line) in enumerate(lines):
                if first == 0 and line.lstrip().startswith("["):
                    file.seek(0)
                    yield from _array_rows(path, file.read(), texts)
                    return
                yield f":{number}", _line(line, f"{path}:{number}", texts)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected a file of UTF-8 text, got {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got {error}") from error


def _line(line: str, place: str, texts: bool) -> Row:
    try:
        return _row(json.loads(line), place, texts)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: expected a JSON object, got {error}") from error


def _row(value: Any, place: str, texts: bool) -> Row:
    if texts and isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected a JSON object{' or text' * texts}, got {type(value).__name__}")
    return value


def _array_rows(path: Path, text: str, texts: bool) -> Iterator[tuple[str, Row]]:
    """Objects of one JSON array, one after the other: all of them at once take many times the file's size."""
    decoder, comma, end = json.JSONDecoder(), re.compile(r"\s*,\s*"), re.compile(r"\s*\]\s*$")
    place, index = text.index("[") + 1, 0
    while not end.match(text, place):
        match = comma.match(text, place) if index else re.compile(r"\s*").match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise ValueError(f"{path}:{line}: expected ',' or the end of the JSON array, got {text[place:][:40]!r}")
        try:
            row, place = decoder.raw_decode(text, match.end())
        except ValueError as error:
            raise ValueError(f"{path}[{index}]: expected a JSON object, got {error}") from error
        yield f"[{index}]", _row(row, f"{path}[{index}]", texts)
        index += 1


def _token_rows(path: Path) -> Iterator[tuple[str, Row]]:
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


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a `.parquet` file."""
    parquet = _library("pyarrow.parquet", "a .parquet file")
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=_ROWS_AT_A_TIME)
        rows = (row for batch in batches for row in batch.to_pylist())
        for index, row in enumerate(rows):
            yield f"[{index}]", row
    except _library("pyarrow", "a .parquet file").ArrowException as error:
        raise ValueError(f"{path}: expected a parquet file, got {error}") from error


def _hub_rows(name: re.Match[str]) -> Iterator[tuple[str, Row]]:
    """Rows of a data set of the hub, fetched once and kept by its library."""
    datasets = _library("datasets", "a data set of the hub")
    split = name["split"] or "train"
    try:
        rows = datasets.load_dataset(name["name"], name["config"], split=split)
    except Exception as error:  # it raises what its libraries for the network do
        message = " ".join(str(error).split())
        raise OSError(f"data: expected a file or a data set of the hub, got {name[0]}: {message}") from error
    for index, row in enumerate(rows):
        yield f"[{index}]", row


def _library(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"data: {purpose} needs {name.partition('.')[0]}: pip install 'specdec-triton[data]'"
        ) from error
