"""An arm: one way to decode the prompts, and the figure that is taken from it.

Greedy arms are replayed on a recording (`specdec.evaluation.replay`); arms that sample are decoded for real. Figures
are means: a sum over prompts by another, so that they can be compared by `specdec.evaluation.intervals`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from transformers import GenerationConfig

from specdec.bench.claims.rates import acceptance_by_rank
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS
from specdec.drafters.load import load_drafter
from specdec.drafting.base import Drafter
from specdec.evaluation.replay import RecordedTarget, Recording, record, replay
from specdec.evaluation.selection import evenly
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.rules import AcceptanceRule, Greedy
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

__all__ = ["COMMON", "Arm", "Bench", "Counts", "NotRunError", "Sizes", "figures", "shared"]

COMMON: tuple[int, ...] = ()
"""In the place of a tree: the one that all arms of a run share."""

Figure: TypeAlias = Literal["tau", "nodes per token", "path nodes per token", "acceptance rate"]
Counts: TypeAlias = dict[int, tuple[float, float]]
"""By number of the prompt: what is summed above and below the bar of the mean."""


class NotRunError(RuntimeError):
    """An arm cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode.

    Attributes:
        drafter: a kind without weights, or the name of a folder.
        tree: a k_config, `COMMON`, or None for the one that the drafter was saved with.
        rule: the acceptance rule.
        temperature: of the target and of drawn candidates.
        figure: acceptance length (`"tau"`); nodes that the target scores per token, of a tree or of its root-to-leaf
            paths in rows of their own; or how often one of `num_candidates` at a node is accepted.
        num_candidates: of an acceptance rate.
        is_short: measured on as few prompts and tokens as an arm that samples, to be compared with one.
    """

    drafter: str
    tree: tuple[int, ...] | None = COMMON
    rule: AcceptanceRule = field(default_factory=Greedy)
    temperature: float = 0.0
    figure: Figure = "tau"
    num_candidates: int = 1
    is_short: bool = False

    @property
    def steps(self) -> "Arm":
        """The arm whose steps this figure is counted from."""
        return replace(self, figure="tau") if self.figure != "acceptance rate" else self

    def __str__(self) -> str:
        """Its name in records and tables."""
        tree = "own tree" if self.tree is None else _text(self.tree) or "common tree"
        if self.figure == "acceptance rate":
            return f"{self.drafter}, {self.num_candidates} candidates, {_rule(self.rule)}, T = {self.temperature:g}"
        head = "" if self.figure == "tau" else f"{self.figure}: "
        short = ", short" if self.is_short else ""
        return f"{head}{self.drafter}, {tree}, {_rule(self.rule)}, T = {self.temperature:g}{short}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is decoded.

    Attributes:
        num_new_tokens: per prompt.
        num_sampled_prompts: prompts of the arms that sample, spread over all; None for all.
        num_sampled_tokens: new tokens of these.
        num_contexts: places per prompt that acceptance rates are computed at.
        common_tree: the tree that arms share.
        batch_size: prompts at a time.
        seed: of sampling.
    """

    num_new_tokens: int = 128
    num_sampled_prompts: int | None = None
    num_sampled_tokens: int = 32
    num_contexts: int = 4
    common_tree: tuple[int, ...] = (4, 2, 1, 1)
    batch_size: int = 8
    seed: int = 0


class Bench:
    """Measures arms on a target and its prompts.

    Args:
        target: the target.
        prompts: 1-D int64 tensors.
        stop_tokens: tokens after which a text ends.
        folder: holds the drafters by name; those of other training seeds as NAME.seed1, NAME.seed2, ...
        sizes: how much is decoded.
        arms: those that will be measured.
        make_recording: gives the recording of plain decoding when it is first needed; `record` by default.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[torch.Tensor],
        stop_tokens: Sequence[int],
        folder: Path,
        sizes: Sizes,
        arms: Sequence[Arm],
        make_recording: Callable[["Bench"], Recording] | None = None,
    ) -> None:
        self.target = target
        self.prompts = prompts
        self.stop_tokens = tuple(stop_tokens)
        self.folder = folder
        self.sizes = sizes
        self._arms = arms
        self._make_recording = make_recording or Bench.record
        self._rates_of: dict[tuple[str, AcceptanceRule, float], list[torch.Tensor]] = {}

    def sources(self, arm: Arm) -> list[str]:
        """The drafters of an arm, one per training seed; none if there is no such folder."""
        if arm.drafter in KINDS_WITHOUT_WEIGHTS:
            return [arm.drafter]
        seeds = sorted(self.folder.glob(f"{arm.drafter}.seed[0-9]*"))
        return [path.name for path in (self.folder / arm.drafter, *seeds) if path.is_dir()]

    def drafter(self, arm: Arm, source: str) -> Drafter:
        """The drafter of an arm, with the arm's tree.

        Raises:
            ValueError: it cannot have that tree.
        """
        if source in KINDS_WITHOUT_WEIGHTS:
            return load_drafter(source, self.target)
        return load_drafter(self.folder / source, self.target, tree=_shape(arm, self.sizes.common_tree))

    def measure(self, arm: Arm, source: str) -> Counts:
        """Count what an arm does with one drafter.

        Raises:
            NotRunError: the drafter cannot do what is asked of it.
        """
        try:
            if arm.figure == "acceptance rate":
                return self._rates(arm, source)
            drafter = self.drafter(arm, source)
            if isinstance(arm.rule, Greedy) and arm.temperature == 0 and not drafter.reads_rejected:
                length = self.sizes.num_sampled_tokens if arm.is_short else None
                stats = replay(self.recorded, drafter, batch_size=self.sizes.batch_size, max_new_tokens=length)
                places = list(range(len(self.prompts)))
            else:
                places = self._sampled_places()
                stats = self._decode(arm, drafter, [self.prompts[place] for place in places])
        except ValueError as error:
            raise NotRunError(str(error)) from error
        rows = zip(places, stats.num_emitted, strict=True)
        # a text of one token has no step, and says nothing
        return {place: (float(sum(row)), float(len(row))) for place, row in rows if row}

    def record(self) -> Recording:
        """Decode all prompts plainly."""
        sizes = self.sizes
        return record(
            self.target,
            self.prompts,
            sizes.num_new_tokens,
            stop_tokens=self.stop_tokens,
            batch_size=2 * sizes.batch_size,
            on_progress=lambda done: print(f"recording: {done} of {len(self.prompts)} prompts", flush=True),
        )

    @cached_property
    def recorded(self) -> RecordedTarget:
        """What greedy arms run on, with whatever their drafters tap."""
        for arm in self._arms:
            for source in self.sources(arm):
                with suppress(NotRunError, ValueError):  # `measure` tells
                    self.drafter(arm, source).bind(self.target)
        return RecordedTarget(self.target, self._make_recording(self))

    def _sampled_places(self) -> list[int]:
        return evenly(range(len(self.prompts)), self.sizes.num_sampled_prompts)

    def _decode(self, arm: Arm, drafter: Drafter, prompts: Sequence[torch.Tensor]) -> AcceptanceStats:
        """Decode for real."""
        sizes, stats = self.sizes, []
        decoder = Decoder(self.target, drafter, acceptance=arm.rule)
        for first in range(0, len(prompts), sizes.batch_size):
            batch = list(prompts[first : first + sizes.batch_size])
            result = decoder.decode(
                batch,
                sizes.num_sampled_tokens,
                stop_tokens=self.stop_tokens,
                seed=[sizes.seed + first + row for row in range(len(batch))],  # of a prompt the same in every arm
                processing=self._processing(arm, batch),
            )
            stats.append(result.stats)
        return AcceptanceStats.merged(stats)

    def _processing(self, arm: Arm, prompts: Sequence[torch.Tensor]) -> Processing:
        lengths = [len(prompt) for prompt in prompts]
        return Processing(
            GenerationConfig(temperature=arm.temperature or None, do_sample=arm.temperature > 0),
            do_sample=arm.temperature > 0,
            prompt_lengths=lengths,
            max_new_tokens=self.sizes.num_sampled_tokens,
            width=max(lengths),
            device=self.target.device,
            backend=self.target.backend,
        )

    def _rates(self, arm: Arm, source: str) -> Counts:
        """Sums of acceptance rates and numbers of places, by prompt."""
        drafter = self.drafter(replace(arm, tree=(1,)), source)
        if not isinstance(drafter, DraftModel):
            raise NotRunError(f"acceptance rates are computed for draft models, got {drafter.kind}")
        drafter.bind(self.target)
        key = (source, arm.rule, arm.temperature)
        if key not in self._rates_of:
            self._rates_of[key] = acceptance_by_rank(
                self.target,
                drafter.draft_target,
                self.recorded.recording.texts,
                num_contexts=self.sizes.num_contexts,
                rule=arm.rule,
                temperature=arm.temperature,
                seed=self.sizes.seed,
            )
        return {
            place: (float(rates[:, arm.num_candidates - 1].sum()), float(rates.shape[0]))
            for place, rates in enumerate(self._rates_of[key])
            if rates.shape[0]
        }


def figures(arm: Arm, steps: Counts, common_tree: Sequence[int]) -> Counts:
    """An arm's own counts from those of its steps: tokens and steps by prompt."""
    if arm.figure in ("tau", "acceptance rate"):
        return steps
    shape = _shape(arm, common_tree)
    assert shape is not None  # a cost is claimed of trees that are named
    leaves = [node for node in range(shape.num_nodes) if node not in shape.parent]
    in_paths = sum(shape.depth[leaf] + 1 for leaf in leaves)
    nodes = shape.num_nodes if arm.figure == "nodes per token" else in_paths
    return {place: (nodes * count, tokens) for place, (tokens, count) in steps.items()}


def shared(counts: Sequence[Mapping[int, tuple[float, float]]], places: Sequence[int]) -> torch.Tensor:
    """[seeds, prompts, 2] float64 counts of an arm at some prompts, one entry per training seed."""
    return torch.tensor([[one[place] for place in places] for one in counts], dtype=torch.float64)


def _shape(arm: Arm, common_tree: Sequence[int]) -> TreeShape | None:
    """The tree of an arm; None for the one that its drafter was saved with."""
    tree = common_tree if arm.tree == COMMON else arm.tree
    return None if tree is None else TreeShape.from_k_config(tree)


def _text(tree: Sequence[int]) -> str:
    return "x".join(map(str, tree))


def _rule(rule: AcceptanceRule) -> str:
    """A rule with its settings, as it is printed."""
    return repr(rule).replace("()", "").lower()
