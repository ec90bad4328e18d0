"""Writing files so that a crash, a full disk or Ctrl-C never leaves a half-written file in a good one's place."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replace_file", "replace_folder"]


@contextmanager
def replace_folder(destination: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside `destination`; on success it takes its place, on an error it vanishes."""
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


def replace_file(destination: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `destination` in one step: readers see the old content or the new, never a part."""
    destination = Path(destination).absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}-", dir=destination.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, destination)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
