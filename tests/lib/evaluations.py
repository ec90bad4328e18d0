"""Evaluations made by hand: figures that one can compute on paper, and texts that are awkward to show."""

from dataclasses import asdict, replace

from specdec.common.provenance import append_record
from specdec.evaluation.checking import Divergence
from specdec.evaluation.plans import AnswerPlan
from specdec.evaluation.records import (
    About,
    Answer,
    ArmInfo,
    LeftOut,
    RecordFiles,
    Results,
    Trace,
    TracedStep,
)

# What breaks pages: markup, the end of a script, separators that end lines of JavaScript, controls, a character that
# turns the direction, letters that are written from the right, half a surrogate pair, a joined emoji.
AWKWARD = [
    "</script><img src=x onerror=alert(1)>",
    "&amp; <b>",
    "\u2028\u2029",
    "\x00\x1b[31m",
    "\u202eabc",
    "\u05e9\u05dc\u05d5\u05dd",
    "\ud800",
    "\U0001f469\u200d\U0001f4bb",
    "<!--",
]

ARMS = [
    ArmInfo("none", "specdec", "plain decoding"),
    ArmInfo("medusa", "specdec", "medusa, tree of 5 nodes, 0.3 M parameters"),
    ArmInfo("transformers", "transformers", "generate"),
]

SESSION = {
    "git_sha": "0123456789abcdef",
    "git_dirty": False,
    "device": "cpu",
    "driver": None,
    "sm_clock_max": None,
    "cpu": "A Processor",
    "threads": 2,
    "python": "3.11.2",
    "torch": "2.13.0",
    "cuda": None,
    "triton": "3.6.0",
    "transformers": "5.23.0",
    "argv": ["specdec", "eval", "--model", "tiny", "--prompts", "my prompts.jsonl"],
    "utc": "2026-11-22T18:00:00+00:00",
}


def question(name, group, category="", num_turns=1, opening="What?"):
    """A row of `About.questions`."""
    return {"name": name, "category": category, "num_turns": num_turns, "opening": opening, "group": group}


def answer(arm, question, **changes):
    """An answer of four tokens in a second by the first question's defaults."""
    fields = {
        "category": "",
        "turn": 1,
        "temperature": 0.0,
        "seed": 0,
        "repeat": 0,
        "group": 0,
        "num_prompt_tokens": 3,
        "tokens": [5, 6, 7, 8],
        "pieces": ["a", "b", "c", "d"] if arm == "none" else None,
        "seconds": 1.0,
        "num_emitted": None if arm == "transformers" else [1, 1, 1] if arm == "none" else [3],
        "deepest": None if arm == "transformers" else [0, 0, 0] if arm == "none" else [2],
        "times_ms": {},
        "divergence": None,
    }
    return Answer(arm=arm, question=question, **{**fields, **changes})


def results_of(questions, answers, *, arms=ARMS, missing=None, left_out=(), traces=(), **settings):
    """Results as `read_results` gives them."""
    asked = {
        "model": "tiny",
        "prompts": [{"name": "spec_bench", "sha256": "4b6d33e7", "left_out": []}],
        "repeats": 1,
        "seeds": [0],
        "temperatures": [0.0],
        "batch_size": 1,
        **settings,
    }
    return Results(
        About(asked, list(arms), list(questions)),
        {one.key: one for one in answers},
        dict(missing or {}),
        list(left_out),
        [dict(SESSION)],
        {one.key: one for one in traces},
    )


def evaluation():
    """Two categories and temperatures, arms of ours and of transformers; one missing, one prompt left out, one text
    that differs, and two traces."""
    opening = f"What does {AWKWARD[0]} mean? {AWKWARD[5]}"
    questions = [
        question("81", 0, "writing", num_turns=2, opening="Write a poem"),
        question("111", 1, "math", opening=opening),
        question("112", 2, "math", opening="2 + 2?"),
    ]
    places = [("81", 1), ("81", 2), ("111", 1), ("112", 1)]
    answers = []
    for temperature in (0.0, 1.0):
        for place, (name, turn) in enumerate(places):
            group, category = {"81": (0, "writing"), "111": (1, "math"), "112": (2, "math")}[name]
            where = {"turn": turn, "temperature": temperature, "group": group, "category": category}
            pieces = [*AWKWARD, " and", "\n", "", "more"] if name == "111" else [f" w{n}" for n in range(13)]
            fields = {**where, "tokens": list(range(13)), "pieces": pieces}
            answers.append(answer("none", name, **fields, seconds=2.0, num_emitted=[1] * 12, deepest=[0] * 12))
            other = {**fields, "pieces": None if temperature == 0 else pieces[::-1]}
            emitted = [3, 2, 3, 1, 3]
            answers.append(
                answer("medusa", name, **other, seconds=0.8 + 0.2 * place, num_emitted=emitted, deepest=[2] * 5)
            )
            theirs = {**other, "seconds": 2.5}
            if name == "112" and temperature == 0:
                texts = [*pieces[:5], " otherwise"]
                difference = asdict(Divergence(0, 5, 5, 99, 0.25, 0.0))
                theirs |= {"pieces": texts, "tokens": [0, 1, 2, 3, 4, 99], "divergence": difference}
            answers.append(answer("transformers", name, **theirs))
    return results_of(
        questions,
        answers,
        arms=[*ARMS, ArmInfo("eagle", "specdec", "eagle, tree of 26 nodes")],
        missing={"eagle": "features: expected 64 values, got <128>"},
        left_out=[LeftOut("82", 1, 9000, "9000 tokens and 64 new ones, of 2048")],
        traces=[_trace("81", [f" w{n}" for n in range(13)]), _trace("111", [*AWKWARD, " and", "\n", "", "more"])],
        temperatures=[0.0, 1.0],
        max_new_tokens=13,
    )


def planned_evaluation():
    """The same with what was chosen for every answer of medusa, now a union with a lookup in the text: both at first,
    then one of them, plain decoding, the other."""
    results = evaluation()
    plan = AnswerPlan(
        members=["lookup", "medusa <b>"],
        sets=[[0, 1], [0], [], [1]],
        chosen=[0, 1, 2, 2, 3],
        num_nodes=[16, 8, 1, 1, 4],
        predicted=[3.5, 2.25, 1.0, 1.0, 2.75],
        emitted=[3, 2, 3, 1, 3],
        proposed_by=[3, 4],
        predicted_tokens=10.5,
        cost_ms=8.0,
        predicted_speedup=1.25,
        real_speedup=1.5,
    )
    for key, one in results.answers.items():
        if key.arm == "medusa":
            results.answers[key] = replace(one, plan=plan)
    return results


def _trace(name, pieces):
    """Every step has a root, two nodes below it, and two below the first of these."""
    steps, begin = [], 1
    for count in (3, 2, 3, 1, 3):
        new = pieces[begin : begin + count]
        wrong = AWKWARD[begin % len(AWKWARD)]
        steps.append(
            TracedStep(
                parent=[-1, 0, 0, 1, 1],
                pieces=[pieces[begin - 1], new[0] if count > 1 else wrong, " x", new[1] if count > 2 else " y", " z"],
                probs=[1.0, 0.6, 0.3, 0.52, 0.00001],
                choices=[new[0], new[min(1, count - 1)], " q", new[-1], " r"],
                choice_probs=[0.6, 0.52, 0.9, 0.7, 0.9],
                path=[0, 1, 3][:count],
                emitted=new,
            )
        )
        begin += count
    return Trace("medusa", name, 1, 0.0, 0, pieces[0], steps)


def write_records(results, folder):
    """The records of an evaluation as its run leaves them."""
    files = RecordFiles(folder)
    files.begin(results.about)
    for session in results.sessions:
        append_session(files, session)
    for one in results.left_out:
        files.left_out(one)
    for arm, reason in results.missing.items():
        files.missing(arm, reason)
    for one in results.answers.values():
        files.answer(one)
    for one in results.traces.values():
        files.trace(one)


def append_session(files, session):
    """A session with a provenance of its own."""
    append_record(files.records, {"record": "session", "provenance": session})
