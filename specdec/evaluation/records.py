"""What an evaluation leaves in its folder, line by line, and what stands there when it is read again.

`records.jsonl`, one JSON object a line, each with its provenance; `record` says what it is:

    evaluation   the first line: what was asked, which arms there are, which questions
    session      a process that went to work on it: where, when, by which command
    answer       one arm's answer to one prompt (`Answer`)
    left_out     a prompt that does not fit into the model's context
    missing      an arm that could not run, and why

`traces.jsonl`: answers step by step, with their draft trees (`Trace`). A line that somebody was killed in writing is
the last one and is dropped when the run goes on; any other line that cannot be read is an error.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from specdec.common.provenance import append_record
from specdec.evaluation.plans import AnswerPlan

__all__ = [
    "FORMAT",
    "PLAIN",
    "About",
    "Answer",
    "ArmInfo",
    "Key",
    "LeftOut",
    "Missing",
    "Results",
    "Trace",
    "TracedStep",
]
__all__ += ["RecordFiles", "read_results"]

FORMAT = 1
"""Version of the files; another one is refused."""

PLAIN = "none"
"""The arm of plain decoding, which every speedup is over."""

RECORDS, TRACES = "records.jsonl", "traces.jsonl"


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """One way to decode.

    Attributes:
        name: in records and reports.
        library: "specdec" or "transformers".
        about: its kind, tree and size in words.
    """

    name: str
    library: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """What an evaluation is of.

    Attributes:
        settings: what was asked, by the name of the option; a run that goes on must ask the same.
        arms: in the order of reports, plain decoding first.
        questions: per question `name`, `category`, `num_turns`, `opening` (of its text) and `group`.
    """

    settings: dict[str, Any]
    arms: list[ArmInfo]
    questions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A question that cannot be asked as it is, such as one that is too long for the model's context.

    Attributes:
        question: its name.
        turn: from which on, from 1.
        num_tokens: of the prompt; None where there is none.
        reason: in words.
    """

    question: str
    turn: int
    num_tokens: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """An arm that could not run, or not to the end.

    Attributes:
        arm: its name.
        reason: in words.
    """

    arm: str
    reason: str


@dataclass(frozen=True, slots=True)
class Key:
    """What an answer is known by."""

    arm: str
    question: str
    turn: int
    temperature: float
    seed: int
    repeat: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer to one prompt.

    Attributes:
        arm: name of the arm.
        question: name of the question.
        category: of the question; empty without one.
        turn: of the question, from 1.
        temperature: 0 for greedy decoding.
        seed: of sampling.
        repeat: from 0; repeats time the same answer again.
        group: number of the batch that was decoded together, the same for all arms.
        num_prompt_tokens: of the prompt.
        tokens: new tokens, a stop token included.
        pieces: what each token adds to the text; None where the text is that of plain decoding.
        seconds: wall time of the whole call, prompt included, for all rows of the group.
        num_emitted: tokens of each step behind the prompt's; None for arms that do not tell.
        deepest: depth of the deepest proposed node at each step; None for arms that do not tell.
        times_ms: the group's time by phase.
        divergence: of greedy decoding, where the text first differs from plain decoding's, as
            `specdec.evaluation.checking.Divergence`; None where it is the same, and for sampling.
        plan: what was chosen step by step, of drafters that choose; None for others. It is that of the whole batch, and
            stands with the batch's first answer alone.
    """

    arm: str
    question: str
    category: str
    turn: int
    temperature: float
    seed: int
    repeat: int
    group: int
    num_prompt_tokens: int
    tokens: list[int]
    pieces: list[str] | None
    seconds: float
    num_emitted: list[int] | None
    deepest: list[int] | None
    times_ms: dict[str, float]
    divergence: dict[str, Any] | None
    plan: AnswerPlan | None = None

    @property
    def key(self) -> Key:
        """What it is known by."""
        return Key(self.arm, self.question, self.turn, self.temperature, self.seed, self.repeat)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step, as the target saw it. Nodes are those in use, node 0 the root.

    Attributes:
        parent: per node, -1 for the root.
        pieces: per node, the text of its token.
        probs: per node, the target's probability of it behind its parent; 1 for the root.
        choices: per node, the text of the target's most probable token behind it.
        choice_probs: per node, that token's probability.
        path: accepted nodes from the root on.
        emitted: texts of the tokens that the step emitted: the accepted nodes' and the target's own.
    """

    parent: list[int]
    pieces: list[str]
    probs: list[float]
    choices: list[str]
    choice_probs: list[float]
    path: list[int]
    emitted: list[str]


@dataclass(frozen=True, slots=True)
class Trace:
    """An answer step by step.

    Attributes:
        arm: name of the arm.
        question: name of the question.
        turn: from 1.
        temperature: of the answer.
        seed: of sampling.
        first: text of the first token, which the prompt's pass gave.
        steps: the steps behind it.
    """

    arm: str
    question: str
    turn: int
    temperature: float
    seed: int
    first: str
    steps: list[TracedStep]

    @property
    def key(self) -> Key:
        """The answer that it is of."""
        return Key(self.arm, self.question, self.turn, self.temperature, self.seed, 0)


@dataclass(slots=True)
class Results:
    """What a folder holds.

    Attributes:
        about: what the evaluation is of.
        answers: by key, in the order in which they were measured.
        missing: arms that could not run, and why.
        left_out: prompts that did not fit.
        sessions: provenance of every process that worked on it.
        traces: by the key of the answer.
    """

    about: About
    answers: dict[Key, Answer] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    traces: dict[Key, Trace] = field(default_factory=dict)

    @property
    def temperatures(self) -> list[float]:
        """Those with answers, in rising order."""
        return sorted({key.temperature for key in self.answers})

    def text_of(self, answer: Answer) -> list[str]:
        """What each token of an answer adds to the text."""
        if answer.pieces is not None:
            return answer.pieces
        # by the plain answer of its own kind, which was measured first where it is the same text
        return self.answers[_plain_key(answer)].pieces or []


class RecordFiles:
    """The files of an evaluation's folder, to be written to."""

    def __init__(self, folder: Path) -> None:
        self.records, self.traces = folder / RECORDS, folder / TRACES

    def repair(self) -> None:
        """Drop what somebody was killed in writing."""
        for file in (self.records, self.traces):
            content = file.read_bytes() if file.is_file() else b""
            if content and not content.endswith(b"\n"):
                with file.open("ab") as stream:
                    stream.truncate(content.rfind(b"\n") + 1)

    def begin(self, about: About) -> None:
        """The first line."""
        append_record(self.records, {"record": "evaluation", "format": FORMAT, **asdict(about)})

    def session(self) -> None:
        """A process goes to work."""
        append_record(self.records, {"record": "session"})

    def answer(self, answer: Answer) -> None:
        """An answer was measured."""
        append_record(self.records, {"record": "answer", **asdict(answer)})

    def left_out(self, one: LeftOut) -> None:
        """A prompt does not fit."""
        append_record(self.records, {"record": "left_out", **asdict(one)})

    def missing(self, arm: str, reason: str) -> None:
        """An arm cannot run."""
        append_record(self.records, {"record": "missing", **asdict(Missing(arm, reason))})

    def trace(self, trace: Trace) -> None:
        """An answer was traced."""
        append_record(self.traces, {"record": "trace", **asdict(trace)})


def read_results(folder: str | Path) -> Results:
    """What an evaluation left in its folder.

    Raises:
        FileNotFoundError: there are no records.
        ValueError: records of another version, or a line that is none; the message names the file and the line.
    """
    files = RecordFiles(Path(folder))
    if not files.records.is_file():
        raise FileNotFoundError(f"folder: expected one of 'specdec eval' with {RECORDS}, got {folder}")
    lines = _lines(files.records)
    place, head = next(lines, (f"{files.records}:1", {}))
    if head.get("record") != "evaluation":
        raise ValueError(f"{place}: expected the first line of an evaluation, got {head.get('record', 'none')!r}")
    if head.get("format") != FORMAT:
        raise ValueError(f"{place}: expected records of format {FORMAT}, got {head.get('format')}; measure anew")
    results = Results(_about(head, place))
    for place, line in lines:
        kind = line.get("record")
        if kind == "answer":
            answer = _answer(line, place, results)
            results.answers[answer.key] = answer
        elif kind == "session":
            results.sessions.append(line["provenance"])
        elif kind == "left_out":
            results.left_out.append(_made(LeftOut, line, place))
        elif kind == "missing":
            missing = _made(Missing, line, place)
            results.missing[missing.arm] = missing.reason
        else:
            raise ValueError(f"{place}: expected an answer, session, left_out or missing, got {kind!r}")
    for place, line in _lines(files.traces) if files.traces.is_file() else ():
        steps = [_made(TracedStep, step, place) for step in line.get("steps", ())]
        trace = _made(Trace, {**line, "steps": steps}, place)
        results.traces[trace.key] = trace
    return results


def _about(head: Mapping[str, Any], place: str) -> About:
    """The first line."""
    about: About = _made(About, head, place)
    return About(about.settings, [_made(ArmInfo, arm, place) for arm in head["arms"]], about.questions)


def _answer(line: Mapping[str, Any], place: str, results: Results) -> Answer:
    """An answer to a question of the first line by an arm of it, whose text is known."""
    answer = _made(Answer, line, place)
    if line.get("plan") is not None:
        answer = replace(answer, plan=_made(AnswerPlan, line["plan"], place))
    if answer.arm not in {arm.name for arm in results.about.arms}:
        raise ValueError(f"{place}: expected an arm of the first line, got {answer.arm!r}")
    if answer.question not in {question["name"] for question in results.about.questions}:
        raise ValueError(f"{place}: expected a question of the first line, got {answer.question!r}")
    if answer.pieces is None and _plain_key(answer) not in results.answers:
        where = f"{answer.question}, turn {answer.turn}"
        raise ValueError(f"{place}: expected plain decoding's answer to {where}, got none, and this text is as its")
    return answer


def _plain_key(answer: Answer) -> Key:
    """The answer of plain decoding whose text an answer's is where it has none of its own."""
    return Key(PLAIN, answer.question, answer.turn, answer.temperature, answer.seed, 0)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place; a last line without an end was not finished."""
    content = file.read_text(encoding="utf-8")
    for number, line in enumerate(content[: content.rfind("\n") + 1].split("\n")[:-1], start=1):
        place = f"{file}:{number}"
        try:
            loaded = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: expected a JSON object, got {line[:40]!r}: {error}") from None
        if not isinstance(loaded, dict):
            raise ValueError(f"{place}: expected a JSON object, got {line[:40]!r}")
        yield place, loaded


_Line = TypeVar("_Line", About, Answer, AnswerPlan, ArmInfo, LeftOut, Missing, Trace, TracedStep)


def _made(kind: type[_Line], line: Mapping[str, Any], place: str) -> _Line:
    """The dataclass of a line.

    Raises:
        ValueError: a field is missing.
    """
    declared = fields(kind)
    needed = [one.name for one in declared if one.default is MISSING and one.default_factory is MISSING]
    if absent := [name for name in needed if name not in line]:
        raise ValueError(f"{place}: expected {', '.join(needed)}, got none of {', '.join(absent)}")
    return kind(**{one.name: line[one.name] for one in declared if one.name in line})
