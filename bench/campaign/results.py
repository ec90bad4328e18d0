"""The results of the campaign: records of all commands, and one archive that holds everything a call leaves."""

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specdec.bench.campaign.stages import Stage
from specdec.bench.common.journal import ended, last_lines
from specdec.common.files import replace_file
from specdec.common.provenance import read_records

__all__ = ["LIMIT_BYTES", "WORK", "collect", "log_end", "newest", "pack", "unpack"]

WORK = "work"
"""Folder of the output where the commands leave what they find."""

LIMIT_BYTES = 16 * 2**20
_LOG_BYTES = (2**18, 2**14, 2**10)
_ALWAYS = (".json", ".jsonl", ".md")
_VERDICTS = ("RACECHECK SUMMARY", "ERROR SUMMARY")


def collect(stages: Sequence[Stage], folder: Path) -> list[dict[str, Any]]:
    """The records of all commands in the order of the stages, each with the names of its stage and command.

    What a command was killed in writing is not among them.
    """
    found = []
    for stage in stages:
        for name in stage.commands:
            records = [*ended(read_records(folder / f"{name}.jsonl")), *_verdicts(folder / f"{name}.log")]
            found += [{**record, "stage": stage.name, "command": name} for record in records]
    return found


def _verdicts(log: Path) -> Iterable[dict[str, Any]]:
    """What a sanitizer said at the end of its log."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    said = [line.strip(" =") for line in lines if line.startswith("=====") and any(word in line for word in _VERDICTS)]
    return [{"bench": "sanitizer", "tool": log.stem, "verdict": line} for line in said]


def log_end(folder: Path, name: str) -> str:
    """The last lines of a command's log."""
    log = folder / f"{name}.log"
    return last_lines(log.read_text(errors="replace")) if log.is_file() else ""


def pack(output: Path, target: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Write an archive of all results; its logs are cut to their ends, and say so, until it is small enough.

    Logs and pictures are left out if that does not suffice.
    """
    files = [*sorted(output.glob("*.json*")), *sorted(output.glob("*.md")), *sorted((output / WORK).rglob("*"))]
    files = [file for file in files if file.is_file() and not file.name.startswith(".")]
    for log_bytes in (*_LOG_BYTES, 0):
        kept = [file for file in files if log_bytes or file.suffix in _ALWAYS]
        content = _archive(kept, output, log_bytes)
        if len(content) <= limit_bytes:
            break
    replace_file(target, content)


def _archive(files: Sequence[Path], output: Path, log_bytes: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in files:
            content = file.read_bytes()
            if file.suffix == ".log" and len(content) > log_bytes:
                note = f"[the first {len(content) - log_bytes} bytes were cut]\n"
                content = note.encode() + content[-log_bytes:]
            entry = tarfile.TarInfo(file.relative_to(output).as_posix())
            entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def newest(folder: Path) -> Path | None:
    """The archive of the last call in a folder, if there is any."""
    numbered = [file for file in folder.glob("*.tar.gz") if file.name.removesuffix(".tar.gz").isdigit()]
    return max(numbered, key=lambda file: int(file.name.removesuffix(".tar.gz")), default=None)


def unpack(archive: Path, output: Path) -> None:
    """Lay out the results of an archive in a folder, to go on from there."""
    output.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as file:
        file.extractall(output, filter="data")
