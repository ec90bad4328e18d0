"""Which commit the code that runs was taken from."""

import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["command_output", "source_commit"]


def source_commit() -> dict[str, Any]:
    """The commit of the checkout that this code lies in.

    Returns:
        `git_sha`, and `git_dirty`, whether anything was changed since. Outside of a checkout, or installed into
        somebody else's, what SPECDEC_GIT_SHA says and whether SPECDEC_GIT_DIRTY is 1; None without them.
    """
    git = ("git", "-C", str(Path(__file__).parent))
    if command_output(*git, "ls-files", "--error-unmatch", Path(__file__).name) is not None:
        sha = command_output(*git, "rev-parse", "HEAD")
        return {"git_sha": sha, "git_dirty": bool(command_output(*git, "status", "--porcelain"))}
    told = os.environ.get("SPECDEC_GIT_SHA")
    return {"git_sha": told, "git_dirty": os.environ.get("SPECDEC_GIT_DIRTY") == "1" if told else None}


def command_output(*command: str) -> str | None:
    """What a command prints, stripped; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
