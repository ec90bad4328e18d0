"""Writing files so that a crash, a full disk or Ctrl-C never leaves a half-written file in a good one's place."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_folder", "check_replaceable", "file_sha256", "replace_file", "replace_folder"]

_OURS = set(
    "config.json curves.svg generation_config.json model.safetensors model.safetensors.index.json specdec.json "
    "training.json tree.json tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja "
    "origin.json".split()
)
"""Names of the files that a saved model or drafter has."""


def cache_folder() -> Path:
    """Where files are kept that can be fetched again: `SPECDEC_HOME`, or `specdec` in the user's cache folder."""
    if home := os.environ.get("SPECDEC_HOME"):
        return Path(home).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # the standard says that a relative one is to be ignored
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "specdec"


def file_sha256(file: Path) -> str:
    """SHA-256 of what a file holds, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def check_replaceable(destination: str | os.PathLike[str], name: str = "folder") -> None:
    """Refuse to replace what is no saved model or drafter.

    Args:
        destination: a folder that is about to be written.
        name: of the argument, for the message.

    Raises:
        FileExistsError: it is a file, or a folder that holds anything else than the files of a saved one.
    """
    folder = Path(destination)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{name}: expected a folder, got the file {folder}")
    foreign = sorted(entry.name for entry in folder.iterdir() if not _is_ours(entry))
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise FileExistsError(
            f"{name}: expected a new or empty folder, or one of a saved drafter, which is replaced; got {folder}, "
            f"which holds {shown}"
        )


def _is_ours(entry: Path) -> bool:
    is_part = entry.name.startswith("model-") and entry.suffix == ".safetensors"
    return entry.is_file() and (entry.name in _OURS or is_part)


@contextmanager
def replace_folder(destination: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside `destination`; on success it takes its place, on an error it vanishes.

    Raises:
        FileExistsError: as `check_replaceable`.
    """
    check_replaceable(destination)
    destination = Path(destination).absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes it private
        if destination.exists():
            old = folder.with_name(folder.name + "-old")
            destination.rename(old)
            try:
                folder.rename(destination)
            except BaseException:
                old.rename(destination)
                raise
            shutil.rmtree(old)
        else:
            folder.rename(destination)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def replace_file(destination: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` to `destination` in one step: readers see the old content or the new, never a part."""
    destination = Path(destination).absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}-", dir=destination.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, 0o644)
        os.replace(name, destination)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
