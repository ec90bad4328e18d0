"""What decides the texts of a job: settled before the first one is written, and the same for every process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.jobs.prompts import Prompt

__all__ = ["Plan", "line_of"]


def line_of(prompt: Prompt, text: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a text: what was written, and by what it is known again."""
    return {"index": prompt.index, **text, "prompt_hash": prompt.digest, "settings": settings}


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts and what decides their texts.

    Attributes:
        prompts: all of them, in order.
        settings: what decides a text beside its prompt, as JSON has it.
        refused: places of rows that no prompt was made of, and whose lines say so.
    """

    prompts: Sequence[Prompt]
    settings: Callable[[Prompt], Mapping[str, Any]]
    refused: frozenset[int] = frozenset()

    def check(self, lines: Mapping[int, tuple[Path, Mapping[str, Any]]]) -> None:
        """Raise ValueError for lines, by index and with their file, that this plan would not have written."""
        by_index = {prompt.index: prompt for prompt in self.prompts}
        for index, (path, record) in lines.items():
            if index in self.refused and "error" in record:
                continue
            prompt = by_index.get(index)
            if prompt is None or record.get("prompt_hash") != prompt.digest:
                raise ValueError(f"output: expected a new file or one of the same prompts, got {path} with others")
            settings = self.settings(prompt)
            if record.get("settings") != settings:
                raise ValueError(
                    f"output: expected a new file or one written with {settings}, got {path}, in which text {index} "
                    f"has {record.get('settings')}"
                )
