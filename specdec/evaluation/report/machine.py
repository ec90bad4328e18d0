"""Where figures come from: machine, software and commit of every session."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.evaluation.report.document import Cell, Table
from specdec.evaluation.report.numbers import NONE

__all__ = ["describe_machine", "machine_rows", "machine_table"]


def describe_machine(session: Mapping[str, Any]) -> str:
    """A machine in a few words."""
    threads = session.get("threads")
    cpu = f"{session.get('cpu', 'an unknown processor')}, {threads} thread{'s' * (threads != 1)}"
    device = session.get("device", "cpu")
    return cpu if device == "cpu" else str(device)


def machine_rows(session: Mapping[str, Any]) -> dict[str, str]:
    """What a session ran on, by name."""
    versions = {name: session.get(name) for name in ("python", "torch", "triton", "transformers", "cuda", "driver")}
    sha = str(session.get("git_sha") or NONE)
    return {
        "commit": sha[:12] + (", with local changes" if session.get("git_dirty") else ""),
        "device": str(session.get("device", NONE)),
        "processor": str(session.get("cpu", NONE)),
        "threads": str(session.get("threads", NONE)),
        "largest clock": str(session.get("sm_clock_max") or NONE),
        **{name: str(value or NONE) for name, value in versions.items()},
    }


def machine_table(sessions: Sequence[Mapping[str, Any]]) -> Table:
    """All sessions; those on the same machine with the same software share a column."""
    groups: list[tuple[dict[str, str], list[str]]] = []
    for session in sessions:
        rows, when = machine_rows(session), str(session.get("utc", NONE)).replace("T", " ").replace("+00:00", " UTC")
        same = next((dates for known, dates in groups if known == rows), None)
        if same is None:
            groups.append((rows, [when]))
        else:
            same.append(when)
    names = [name for name in machine_rows({}) if any(rows[name] != NONE for rows, _ in groups)]
    lines = [(Cell(name), *(Cell(rows[name]) for rows, _ in groups)) for name in names]
    dates = (Cell("begun"), *(Cell(", ".join(when)) for _, when in groups))
    heads = [f"session {place}" for place in range(1, len(groups) + 1)] if len(groups) > 1 else ["all sessions"]
    return Table("", ("", *heads), [dates, *lines], num_words=1 + len(groups))
