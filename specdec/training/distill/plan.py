"""Which prompts are answered together and how: settled before the first one is, and the same for every process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.common.checks import check_at_least
from specdec.training.distill.prompts import Prompt
from specdec.training.distill.self_prompts import SelfPrompts

__all__ = ["Plan"]

WINDOW = 16
"""Batches among whose prompts those of like length are put together."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts and what decides their texts.

    Attributes:
        prompts: all of them, in order.
        max_new_tokens: most tokens of an answer.
        temperatures: texts take them in turn; 0 is greedy.
        batch_size: texts written at a time.
        seed: of sampling.
        self_prompts: how prompts without a text are made up.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int
    temperatures: Sequence[float]
    batch_size: int
    seed: int
    self_prompts: SelfPrompts | None

    def __post_init__(self) -> None:
        """Check the values."""
        check_at_least(1, {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size})
        check_at_least(0, {"seed": self.seed})
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures: expected one or more of at least 0, got {list(self.temperatures)}")

    def temperature(self, prompt: Prompt) -> float:
        """What its answers are sampled at."""
        return float(self.temperatures[prompt.index % len(self.temperatures)])

    def batches(self) -> list[list[Prompt]]:
        """All prompts in batches of one temperature, in windows in which those of like length are together.

        A batch is read as wide as its longest prompt; the window keeps the file growing in about the order of the data.
        """
        # of every temperature whole batches
        window = self.batch_size * len(self.temperatures) * math.ceil(WINDOW / len(self.temperatures))
        batches: list[list[Prompt]] = []
        for start in range(0, len(self.prompts), window):
            by_temperature: dict[float, list[Prompt]] = {}
            for prompt in self.prompts[start : start + window]:
                by_temperature.setdefault(self.temperature(prompt), []).append(prompt)
            for prompts in by_temperature.values():
                prompts.sort(key=lambda prompt: len(prompt.tokens), reverse=True)
                batches += [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
        return batches

    def line(self, prompt: Prompt, text: Mapping[str, Any]) -> dict[str, Any]:
        """The line of a text: what was written, and by what it is known again."""
        return {"index": prompt.index, **text, "prompt_hash": prompt.digest, "settings": self._settings(prompt)}

    def check(self, lines: Mapping[int, tuple[Path, Mapping[str, Any]]]) -> None:
        """Raise ValueError for lines, by index and with their file, that this plan would not have written."""
        by_index = {prompt.index: prompt for prompt in self.prompts}
        for index, (path, record) in lines.items():
            prompt = by_index.get(index)
            if prompt is None or record.get("prompt_hash") != prompt.digest:
                raise ValueError(f"output: expected a new file or one of the same prompts, got {path} with others")
            settings = self._settings(prompt)
            if record.get("settings") != settings:
                raise ValueError(
                    f"output: expected a new file or one written with {settings}, got {path}, in which text {index} "
                    f"has {record.get('settings')}"
                )

    def _settings(self, prompt: Prompt) -> dict[str, Any]:
        """What decides a text beside its prompt."""
        settings = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature(prompt)}
        if prompt.is_self_made or settings["temperature"]:
            settings["seed"] = self.seed + prompt.index
        if prompt.is_self_made and self.self_prompts is not None:
            settings["prompt_temperature"] = self.self_prompts.temperature
            settings["prompt_tokens"] = self.self_prompts.max_tokens
        return settings
