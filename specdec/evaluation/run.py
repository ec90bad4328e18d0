"""An evaluation: every arm on every prompt, in one run, each answer on file before the next one begins.

Arms take turns prompt by prompt, in an order that is drawn for every prompt, so that a drift of the machine hits all of
them alike. Prompts come in a drawn order, too: a run that is cut off has seen a fair sample of them. A question's later
turns follow plain decoding's answers to the earlier ones, so that all arms read the same prompts.
"""

import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.common.text_pieces import pieces_of
from specdec.drafting.base import Drafter
from specdec.evaluation.arms import Arm, Decoded, Request, our_arms, transformers_arms
from specdec.evaluation.checking import first_divergence
from specdec.evaluation.plans import short_plan
from specdec.evaluation.prompts import Question, conversation_prompt, split_by_length
from specdec.evaluation.records import (
    PLAIN,
    About,
    Answer,
    ArmInfo,
    Key,
    LeftOut,
    RecordFiles,
    Results,
    Trace,
    read_results,
)
from specdec.evaluation.selection import shuffled
from specdec.evaluation.tracing import trace
from specdec.models.target.target import Target

__all__ = ["Plan", "Progress", "check_folder", "evaluate"]

_OPENING = 160  # characters of a question that reports show
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        max_new_tokens: most new tokens of an answer.
        temperatures: 0 is greedy decoding.
        seeds: of sampling; greedy decoding has the first alone.
        batch_size: prompts that are decoded together, all of one category.
        repeats: times that each answer is timed; the median counts.
        with_transformers: measure transformers' arms too.
        num_traces: prompts whose answers are traced with every drafter; None for all.
        minutes: time after which no further prompt begins; None for no limit.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    seeds: tuple[int, ...] = (0,)
    batch_size: int = 1
    repeats: int = 1
    with_transformers: bool = True
    num_traces: int | None = 4
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_at_least(1, {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size})
        check_at_least(1, {"repeats": self.repeats, "seeds": len(self.seeds), "temperatures": len(self.temperatures)})
        check_at_least(0, {"num_traces": self.num_traces, "minutes": self.minutes})
        for temperature in self.temperatures:
            check_at_least(0, {"temperatures": temperature})
        for name, values in (("temperatures", self.temperatures), ("seeds", self.seeds)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: expected different ones, got {', '.join(map(str, values))}")

    @property
    def settings(self) -> dict[str, Any]:
        """What must stay the same when a run goes on."""
        lasting = asdict(self)
        return {name: lasting[name] for name in lasting if name not in ("num_traces", "minutes")}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is.

    Attributes:
        num_done: answers on file, repeats counted.
        num_all: answers that the plan asks for.
        doing: what is measured now.
    """

    num_done: int
    num_all: int
    doing: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Questions that are decoded together."""

    number: int
    questions: tuple[Question, ...]


@dataclass(slots=True)
class _Run:
    """One process at work on an evaluation."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    files: RecordFiles
    results: Results
    arms: list[Arm]
    on_progress: Callable[[Progress], None]
    deadline: float
    num_all: int = 0
    warm: set[tuple[str, float]] = field(default_factory=set)

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def run(self, groups: Sequence[_Group]) -> bool:
        """Measure what is due; returns whether everything is measured."""
        turns = sum(len(question.turns) for group in groups for question in group.questions)
        lists = sum(len(self._seeds(temperature)) for temperature in self.plan.temperatures)
        self.num_all = turns * lists * self.plan.repeats * len(self.arms)
        for group in groups:
            for temperature in self.plan.temperatures:
                for seed in self._seeds(temperature):
                    if self.is_late:
                        return False
                    self._measure(group, temperature, seed)
        return self._trace(groups)

    def _seeds(self, temperature: float) -> tuple[int, ...]:
        return self.plan.seeds if temperature else self.plan.seeds[:1]

    def _measure(self, group: _Group, temperature: float, seed: int) -> None:
        """All arms on all turns of a group."""
        for turn in range(1, max(len(question.turns) for question in group.questions) + 1):
            rows = self._rows(group, turn, temperature, seed)
            if not rows:
                continue
            prompts = [prompt for _, prompt in rows]
            for repeat in range(self.plan.repeats):
                arms = list(self.arms)
                random.Random(f"{group.number} {turn} {temperature} {seed} {repeat}").shuffle(arms)
                # the others' texts are compared with plain decoding's
                for arm in sorted(arms, key=lambda arm: arm.info.name != PLAIN) if repeat == 0 else arms:
                    keys = [Key(arm.info.name, question.name, turn, temperature, seed, repeat) for question, _ in rows]
                    if arm.info.name in self.results.missing or all(key in self.results.answers for key in keys):
                        continue
                    self._say(f"{arm.info.name}, {rows[0][0].name}")
                    self._answer(arm, keys, group, [question for question, _ in rows], prompts)

    def _rows(self, group: _Group, turn: int, temperature: float, seed: int) -> list[tuple[Question, torch.Tensor]]:
        """The questions of a group that have this turn, with their prompts."""
        rows = []
        for question in group.questions:
            if len(question.turns) < turn:
                continue
            before = [Key(PLAIN, question.name, earlier, temperature, seed, 0) for earlier in range(1, turn)]
            answers = [
                self.tokenizer.decode(self.results.answers[key].tokens, skip_special_tokens=True) for key in before
            ]
            rows.append((question, conversation_prompt(question, answers, self.tokenizer)))
        return rows

    def _answer(
        self,
        arm: Arm,
        keys: Sequence[Key],
        group: _Group,
        questions: Sequence[Question],
        prompts: Sequence[torch.Tensor],
    ) -> None:
        """Time one arm on one batch and put its answers on file; an arm that fails is measured no more."""
        first = keys[0]
        request = self._request(questions, first.temperature, first.seed)
        try:
            decoded, seconds = self._timed(arm, prompts, request)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, KeyError) as error:
            if arm.info.name == PLAIN:
                raise
            traceback.print_exc()
            self._miss(arm.info.name, f"{type(error).__name__}: {error}".splitlines()[0])
            return
        for row, (key, question, prompt) in enumerate(zip(keys, questions, prompts, strict=True)):
            tokens, stats = decoded.tokens[row], decoded.stats
            expected = tokens
            if arm.info.name != PLAIN or key.repeat > 0:
                expected = self.results.answers[replace(key, arm=PLAIN, repeat=0)].tokens
            divergence = None
            if key.temperature == 0 and tokens != expected:
                divergence = first_divergence(self.target, prompt, expected, tokens)
            is_plain = arm.info.name == PLAIN and key.repeat == 0
            answer = Answer(
                **asdict(key),
                category=question.category,
                group=group.number,
                num_prompt_tokens=prompt.shape[0],
                tokens=tokens,
                pieces=pieces_of(self.tokenizer, prompt.tolist(), tokens) if is_plain or tokens != expected else None,
                seconds=seconds,
                num_emitted=stats.num_emitted[row] if stats else None,
                deepest=stats.deepest[row] if stats else None,
                times_ms={name: round(value, 3) for name, value in stats.times_ms.items()} if stats else {},
                divergence=asdict(divergence) if divergence else None,
                plan=short_plan(stats.plan) if stats and stats.plan and row == 0 else None,
            )
            self.files.answer(answer)
            self.results.answers[key] = answer

    def _timed(self, arm: Arm, prompts: Sequence[torch.Tensor], request: Request) -> tuple[Decoded, float]:
        """What an arm gives, and its wall time in seconds."""
        if (arm.info.name, request.temperature) not in self.warm:
            arm.run(prompts, Request(min(_WARM_UP_TOKENS, request.max_new_tokens), request.temperature, request.seeds))
            self.warm.add((arm.info.name, request.temperature))
        decoded, seconds = self._once(arm, prompts, request)
        if decoded.stats is not None and "capture" in decoded.stats.times_ms:  # once for all calls of these sizes
            decoded, seconds = self._once(arm, prompts, request)
        return decoded, seconds

    def _once(self, arm: Arm, prompts: Sequence[torch.Tensor], request: Request) -> tuple[Decoded, float]:
        begin = time.perf_counter()
        decoded = arm.run(prompts, request)  # which ends with tokens on the host
        return decoded, time.perf_counter() - begin

    def _request(self, questions: Sequence[Question], temperature: float, seed: int) -> Request:
        """Each row has a seed of its own, the same for all arms."""
        seeds = tuple(random.Random(f"{seed} {question.name}").getrandbits(31) for question in questions)
        return Request(self.plan.max_new_tokens, temperature, seeds)

    def _miss(self, arm: str, reason: str) -> None:
        self.files.missing(arm, reason)
        self.results.missing[arm] = reason

    def _trace(self, groups: Sequence[_Group]) -> bool:
        """Trace the answers to the first prompts, with every drafter; returns whether all are traced."""
        questions = [question for group in groups for question in group.questions]
        for question in questions[: self.plan.num_traces]:
            prompt = conversation_prompt(question, [], self.tokenizer)
            for temperature in self.plan.temperatures:
                for arm in self.arms:
                    key = Key(arm.info.name, question.name, 1, temperature, self.plan.seeds[0], 0)
                    is_due = key in self.results.answers and key not in self.results.traces
                    if arm.drafter is None or arm.info.name == PLAIN or not is_due:
                        continue
                    if self.is_late:
                        return False
                    self._say(f"tracing {arm.info.name}, {question.name}")
                    request = self._request([question], temperature, self.plan.seeds[0])
                    _, text, steps = trace(self.target, arm.drafter, prompt, request, self.tokenizer)
                    found = Trace(key.arm, key.question, 1, temperature, key.seed, text, steps)
                    self.files.trace(found)
                    self.results.traces[key] = found
        return True

    def _say(self, doing: str) -> None:
        self.on_progress(Progress(len(self.results.answers), self.num_all, doing))


def check_folder(folder: str | Path, *, resume: bool) -> None:
    """Refuse to measure into a folder, before anything is loaded.

    Raises:
        FileExistsError: it has records and `resume` is not set.
        FileNotFoundError: it has none and `resume` is set.
    """
    records = RecordFiles(Path(folder)).records
    if not resume and records.exists():
        raise FileExistsError(
            f"folder: expected one without {records.name}, got {folder}; resume (--resume) goes on with what it has"
        )
    if resume and not records.is_file():
        raise FileNotFoundError(f"folder: expected one with {records.name} to go on with, got {folder}")


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter | str],
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    plan: Plan | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[Results, bool]:
    """Measure drafters, plain decoding and transformers on questions.

    Args:
        target: the target.
        drafters: by the name of the arm; a text in place of one says why it is missing. Plain decoding is always there.
        questions: what is asked, each under another name; they are asked in a drawn order.
        tokenizer: the target's.
        folder: receives `records.jsonl` and `traces.jsonl`, line by line.
        plan: what to measure.
        settings: what else must be the same when the run goes on, such as the model's name; it is part of the records.
        resume: go on with what the folder has.
        on_progress: called before every answer.

    Returns:
        All results of the folder, and whether everything was measured.

    Raises:
        FileExistsError: the folder has records and `resume` is not set.
        FileNotFoundError: it has none and `resume` is set.
        ValueError: no questions, two of one name, a drafter by the name of another arm, or other settings than the
            records'.
    """
    plan = Plan() if plan is None else plan
    check_at_least(1, {"questions": len(questions)})
    if twice := sorted({one.name for one in questions if sum(one.name == other.name for other in questions) > 1}):
        raise ValueError(f"questions: expected different names, got {twice[0]} more than once")
    made = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, Drafter)}
    arms = our_arms(target, made)
    if plan.with_transformers:
        arms += transformers_arms(target, made, batch_size=plan.batch_size)
    names = [arm.info.name for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(f"drafters: expected names beside those of the other arms, got {', '.join(names)}")
    asked, left_out = _askable(questions, target, tokenizer, plan)
    groups = list(_groups(asked, plan.batch_size))
    absent = {name: reason for name, reason in drafters.items() if isinstance(reason, str)}
    infos = [arm.info for arm in arms] + [ArmInfo(name, "specdec") for name in absent]
    about = About({**(settings or {}), **plan.settings}, infos, _told(groups))
    files = RecordFiles(Path(folder))
    results = _opened(files, about, left_out, folder, resume=resume)
    files.session()
    deadline = float("inf") if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    run = _Run(target, tokenizer, plan, files, results, arms, on_progress or (lambda _: None), deadline)
    for name, reason in absent.items():
        if name not in results.missing:
            run._miss(name, reason)
    is_whole = run.run(groups)
    return read_results(folder), is_whole


def _askable(
    questions: Sequence[Question], target: Target, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> tuple[list[Question], list[LeftOut]]:
    """The questions that can be asked, with the turns that can, and what is left out.

    Raises:
        ValueError: no question is left.
    """
    num_turns = None if tokenizer.chat_template is not None else 1
    fitting, others = split_by_length(
        questions,
        tokenizer,
        max_new_tokens=plan.max_new_tokens,
        context=target.max_positions,
        num_turns=num_turns,
    )
    left_out = [LeftOut(one.question.name, 1, one.num_tokens, one.reason) for one in others]
    if not fitting:
        raise ValueError(f"questions: expected some that can be asked, got none: {left_out[0].reason}")
    without = "later turns need a chat template, which the tokenizer does not have"
    left_out += [LeftOut(one.name, 2, None, without) for one in fitting if num_turns == 1 and len(one.turns) > 1]
    return [replace(one, turns=one.turns[:num_turns]) for one in fitting], left_out


def _opened(
    files: RecordFiles, about: About, left_out: Sequence[LeftOut], folder: str | Path, *, resume: bool
) -> Results:
    """The results so far; new files begin with what the evaluation is of."""
    check_folder(folder, resume=resume)
    if not resume:
        files.begin(about)
        for one in left_out:
            files.left_out(one)
        return Results(about)
    files.repair()
    results = read_results(folder)
    before, now = asdict(results.about), asdict(about)
    settings = [
        f"{name} {before['settings'].get(name)!r} (got {now['settings'].get(name)!r})"
        for name in {**before["settings"], **now["settings"]}
        if _as_read(before["settings"].get(name)) != _as_read(now["settings"].get(name))
    ]
    settings += [name for name in ("arms", "questions") if _as_read(before[name]) != _as_read(now[name])]
    if settings:
        raise ValueError(f"resume: expected what the records of {folder} are of, other are: {', '.join(settings)}")
    return results


def _as_read(value: Any) -> Any:
    """A value as JSON gives it back."""
    return list(map(_as_read, value)) if isinstance(value, (list, tuple)) else value


def _groups(questions: Sequence[Question], batch_size: int) -> Iterator[_Group]:
    """Batches of questions of one category, in a drawn order."""
    waiting: dict[str, list[Question]] = {}
    made: list[tuple[Question, ...]] = []
    for question in shuffled(questions, seed=0):
        row = waiting.setdefault(question.category, [])
        row.append(question)
        if len(row) == batch_size:
            made.append(tuple(waiting.pop(question.category)))
    made += [tuple(row) for row in waiting.values()]
    for number, members in enumerate(made):
        yield _Group(number, members)


def _told(groups: Sequence[_Group]) -> list[dict[str, Any]]:
    """The questions as the records tell of them."""
    return [
        {
            "name": question.name,
            "category": question.category,
            "num_turns": len(question.turns),
            "opening": question.turns[0][:_OPENING],
            "group": group.number,
        }
        for group in groups
        for question in group.questions
    ]
