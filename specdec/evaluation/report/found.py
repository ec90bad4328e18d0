"""All figures that a report shows, computed once."""

from collections.abc import Mapping
from dataclasses import dataclass

from specdec.evaluation.checking import Divergence
from specdec.evaluation.figures import ArmFigures, categories, figures, num_finished
from specdec.evaluation.records import Answer, Results

__all__ = ["Found", "find", "is_explained"]


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of an evaluation.

    Attributes:
        results: what they are of.
        whole: by temperature, the figures of all categories together; empty where no group is finished.
        parts: by temperature and category; only where there are two or more categories.
        num_finished: by temperature, groups that all arms have finished.
        num_planned: by temperature, groups that were asked for, for all seeds.
    """

    results: Results
    whole: Mapping[float, list[ArmFigures]]
    parts: Mapping[float, Mapping[str, list[ArmFigures]]]
    num_finished: Mapping[float, int]
    num_planned: Mapping[float, int]

    @property
    def is_whole(self) -> bool:
        """Whether all that was asked for was measured."""
        return all(self.num_finished[temperature] >= planned for temperature, planned in self.num_planned.items())

    @property
    def batch_size(self) -> int:
        """Prompts that were decoded together."""
        return int(self.results.about.settings["batch_size"])


def find(results: Results) -> Found:
    """Compute the figures of an evaluation."""
    temperatures = [float(one) for one in results.about.settings["temperatures"]]
    names = categories(results)
    parts: dict[float, dict[str, list[ArmFigures]]] = {}
    for temperature in temperatures if len(names) > 1 else ():
        every = {name: figures(results, temperature, category=name) for name in names}
        parts[temperature] = {name: arms for name, arms in every.items() if arms}
    return Found(
        results,
        {temperature: figures(results, temperature) for temperature in temperatures},
        parts,
        {temperature: num_finished(results, temperature) for temperature in temperatures},
        {temperature: _num_planned(results, temperature) for temperature in temperatures},
    )


def is_explained(answer: Answer) -> bool:
    """Whether rounding explains where a text differs from plain decoding's."""
    return answer.divergence is None or not Divergence(**answer.divergence).is_error


def _num_planned(results: Results, temperature: float) -> int:
    """Groups that were asked for, for all seeds; greedy decoding has one."""
    groups = {question["group"] for question in results.about.questions}
    return len(groups) * (len(results.about.settings["seeds"]) if temperature else 1)
