"""An evaluation of the bundled model: what is on file, that it goes on where it stopped, what goes wrong by name."""

import json
from dataclasses import asdict

import pytest

from specdec.bundled.load import load_tiny, tiny_drafter
from specdec.common.text_pieces import pieces_of
from specdec.drafters.load import load_drafter
from specdec.drafters.weightless.none import NoDrafter
from specdec.evaluation import run
from specdec.evaluation.figures import figures, num_finished
from specdec.evaluation.prompts import Question, conversation_prompt
from specdec.evaluation.records import PLAIN, Key, RecordFiles, read_results
from specdec.evaluation.run import Plan, evaluate
from specdec.models.target.target import Target

QUESTIONS = [
    Question("1", "classes", ("class Point:\n    def __init__(self, x, y):\n",)),
    Question("2", "classes", ("class Stack:\n", "    def pop(self):\n")),
    Question("3", "functions", ("def mean(values):\n",)),
]
TEMPLATE = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
PLAN = Plan(max_new_tokens=12, temperatures=(0.0, 1.0), num_traces=1)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tiny()[1]


@pytest.fixture(scope="module")
def target():
    return Target(load_tiny()[0])


@pytest.fixture(scope="module")
def drafters(target):
    return {name: load_drafter(source, target) for name, source in (("lookup", "prompt_lookup"), ("medusa", MEDUSA))}


MEDUSA = str(tiny_drafter("medusa"))


@pytest.fixture(scope="module")
def whole(target, drafters, tokenizer, tmp_path_factory):
    """A run from the beginning to the end."""
    folder = tmp_path_factory.mktemp("whole")
    results, is_whole = evaluate(target, drafters, QUESTIONS, tokenizer, folder, PLAN)
    assert is_whole
    return results


def untimed(results):
    """All that does not depend on the clock, in the order of the records."""
    answers = {
        key: {**asdict(one), "seconds": 0, "times_ms": sorted(one.times_ms)} for key, one in results.answers.items()
    }
    return answers, results.traces, results.left_out, results.missing, asdict(results.about)


def test_every_arm_answers_every_prompt_and_greedy_texts_are_plain_decodings(whole):
    arms = ["none", "lookup", "medusa", "transformers", "transformers_prompt_lookup"]
    assert [arm.name for arm in whole.about.arms] == arms
    assert len(whole.answers) == len(arms) * len(QUESTIONS) * 2
    for temperature in (0.0, 1.0):
        assert num_finished(whole, temperature) == 3
        rows = figures(whole, temperature)
        assert [row.arm.name for row in rows] == arms
        assert all(row.num_identical == (3 if temperature == 0 else None) for row in rows)
        assert rows[0].tau.value == 1.0
        assert rows[0].share_slower == 0.0
    for answer in whole.answers.values():
        expected = whole.answers[Key(PLAIN, answer.question, 1, answer.temperature, 0, 0)]
        assert answer.divergence is None
        assert (answer.pieces is None) == (answer.arm != PLAIN and answer.tokens == expected.tokens)
        assert len(whole.text_of(answer)) == len(answer.tokens)
        if answer.num_emitted is not None:
            assert 1 + sum(answer.num_emitted) == len(answer.tokens)
    sampled = {tuple(one.tokens) for key, one in whole.answers.items() if key.temperature == 1 and key.question == "3"}
    assert len(sampled) > 1


def test_every_line_says_where_it_comes_from(whole, target, drafters, tokenizer, tmp_path):
    evaluate(target, {}, QUESTIONS[2:], tokenizer, tmp_path, Plan(max_new_tokens=2, with_transformers=False))
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == ["evaluation", "session", "answer"]
    assert all(
        line["provenance"].keys() >= {"git_sha", "cpu", "torch", "transformers", "argv", "utc"} for line in lines
    )


def test_a_trace_is_the_answer_step_by_step(whole, tokenizer):
    traced = {(key.arm, key.temperature) for key in whole.traces}
    assert traced == {(arm, temperature) for arm in ("lookup", "medusa") for temperature in (0.0, 1.0)}
    assert len({key.question for key in whole.traces}) == 1
    for key, trace in whole.traces.items():
        answer = whole.answers[key]
        assert trace.first + "".join("".join(step.emitted) for step in trace.steps) == "".join(whole.text_of(answer))
        assert [len(step.emitted) for step in trace.steps] == answer.num_emitted
        for step in trace.steps:
            assert step.path[0] == 0
            assert step.parent[0] == -1
            assert step.probs[0] == 1.0
            assert len(step.parent) == len(step.pieces) == len(step.probs) == len(step.choices)
            assert all(parent < node for node, parent in enumerate(step.parent))
            # the accepted path is what was emitted, up to the target's own token
            assert [step.pieces[node] for node in step.path[1:]] == step.emitted[: len(step.path) - 1]
            assert all(step.parent[child] == parent for parent, child in zip(step.path, step.path[1:], strict=False))
            if key.temperature == 0:
                assert step.choices[step.path[-1]] == step.emitted[-1]
                assert all(prob <= step.choice_probs[step.parent[node]] for node, prob in enumerate(step.probs) if node)


@pytest.mark.parametrize("num_answers", [1, 7, 24])
def test_a_run_that_was_killed_goes_on_to_the_same_results(whole, num_answers, target, drafters, tokenizer, tmp_path):
    def kill(progress):
        if progress.num_done == num_answers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(target, drafters, QUESTIONS, tokenizer, tmp_path, PLAN, on_progress=kill)
    records = tmp_path / "records.jsonl"
    cut = records.read_bytes()
    records.write_bytes(cut[:-20])  # within its last line
    assert len(read_results(tmp_path).answers) == num_answers - 1
    results, is_whole = evaluate(target, drafters, QUESTIONS, tokenizer, tmp_path, PLAN, resume=True)
    assert is_whole
    assert untimed(results) == untimed(whole)
    assert len(results.sessions) == 2


@pytest.mark.parametrize("cut", [b"", b'{"record": "ans'])
def test_a_line_that_was_cut_off_is_dropped(cut, tmp_path):
    whole = b'{"record": "evaluation"}\n{"record": "session"}\n'
    (tmp_path / "records.jsonl").write_bytes(whole + cut)
    RecordFiles(tmp_path).repair()
    assert (tmp_path / "records.jsonl").read_bytes() == whole


def test_batches_and_seeds_are_groups_of_one_category(target, drafters, tokenizer, tmp_path):
    plan = Plan(max_new_tokens=6, temperatures=(1.0,), seeds=(3, 4), batch_size=2, repeats=2, num_traces=0)
    results, _ = evaluate(target, drafters, QUESTIONS, tokenizer, tmp_path, plan)
    groups = {one["name"]: one["group"] for one in results.about.questions}
    assert groups["1"] == groups["2"] != groups["3"]
    assert [arm.name for arm in results.about.arms] == ["none", "lookup", "medusa", "transformers"]  # which batch
    assert num_finished(results, 1.0) == 4
    (row, *_) = figures(results, 1.0)
    assert (len(row.groups), row.num_answers) == (4, 6)
    for key, answer in results.answers.items():
        assert answer.tokens == results.answers[Key(key.arm, key.question, 1, 1.0, key.seed, 0)].tokens or (
            "transformers" in key.arm  # whose seed is one for a whole batch
        )


def test_later_turns_follow_the_plain_answers(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    prompts = []
    whole_call = run.pieces_of
    monkeypatch.setattr(
        run, "pieces_of", lambda t, prompt, tokens: prompts.append(prompt) or whole_call(t, prompt, tokens)
    )
    plan = Plan(max_new_tokens=6, with_transformers=False, num_traces=0)
    results, _ = evaluate(target, {}, QUESTIONS[1:2], tokenizer, tmp_path, plan)
    first = results.answers[Key(PLAIN, "2", 1, 0.0, 0, 0)]
    said = tokenizer.decode(first.tokens, skip_special_tokens=True)
    assert prompts[1] == conversation_prompt(QUESTIONS[1], [said], tokenizer).tolist()
    assert {key.turn for key in results.answers} == {1, 2}
    assert num_finished(results, 0.0) == 1


def test_what_cannot_be_asked_is_counted_out(target, tokenizer, tmp_path):
    long = Question("long", "", ("x = 1\n" * 4000,))
    plan = Plan(max_new_tokens=2, with_transformers=False, num_traces=0)
    results, _ = evaluate(target, {}, [*QUESTIONS[:2], long], tokenizer, tmp_path, plan)
    (too_long, turns) = results.left_out
    assert (too_long.question, too_long.turn) == ("long", 1)
    assert "more than the context" in too_long.reason
    assert (turns.question, turns.turn) == ("2", 2)
    assert "chat template" in turns.reason
    assert {key.question for key in results.answers} == {"1", "2"}
    with pytest.raises(ValueError, match="questions: expected some that can be asked"):
        evaluate(target, {}, [long], tokenizer, tmp_path / "b", plan)


class Broken(NoDrafter):
    """Fails once it is asked."""

    def draft(self, root, choose):
        raise RuntimeError("no such weights")


def test_a_drafter_that_fails_is_missing_and_the_others_go_on(target, tokenizer, tmp_path, capsys):
    drafters = {"broken": Broken(), "absent": "does not fit"}
    plan = Plan(max_new_tokens=4, with_transformers=False)
    results, is_whole = evaluate(target, drafters, QUESTIONS[:1], tokenizer, tmp_path, plan)
    assert is_whole
    assert results.missing == {"absent": "does not fit", "broken": "RuntimeError: no such weights"}
    assert [row.arm.name for row in figures(results, 0.0)] == ["none"]
    assert "no such weights" in capsys.readouterr().err


def test_a_wrong_text_is_on_file_with_its_margin(target, tokenizer, tmp_path, monkeypatch):
    made = run.our_arms

    def our_arms(target, drafters):
        plain, other = made(target, drafters)

        def wrong(prompts, request):
            decoded = other.run(prompts, request)
            return type(decoded)([[*row[:3], (row[3] + 7) % 100, *row[4:]] for row in decoded.tokens], decoded.stats)

        return [plain, type(other)(other.info, wrong, other.drafter)]

    monkeypatch.setattr(run, "our_arms", our_arms)
    plan = Plan(max_new_tokens=6, with_transformers=False, num_traces=0)
    results, _ = evaluate(target, {"bad": NoDrafter()}, QUESTIONS[:1], tokenizer, tmp_path, plan)
    answer = results.answers[Key("bad", "1", 1, 0.0, 0, 0)]
    assert answer.divergence["position"] == 3
    assert answer.divergence["margin"] > 0.1
    prompt = conversation_prompt(QUESTIONS[0], [], tokenizer).tolist()
    assert answer.pieces == pieces_of(tokenizer, prompt, answer.tokens)
    bad = figures(results, 0.0)[1]
    assert (bad.num_identical, bad.divergences) == (0, [answer])


def test_a_time_limit_ends_with_what_there_is(target, tokenizer, tmp_path):
    plan = Plan(max_new_tokens=2, with_transformers=False, minutes=0)
    results, is_whole = evaluate(target, {}, QUESTIONS, tokenizer, tmp_path, plan)
    assert not is_whole
    assert not results.answers
    assert figures(results, 0.0) == []
    results, is_whole = evaluate(
        target, {}, QUESTIONS, tokenizer, tmp_path, Plan(2, with_transformers=False), resume=True
    )
    assert is_whole
    assert len(results.answers) == 3


def test_a_folder_is_neither_overwritten_nor_mixed(target, tokenizer, tmp_path):
    plan = Plan(max_new_tokens=2, with_transformers=False, num_traces=0)
    other = Plan(max_new_tokens=3, with_transformers=False, num_traces=0)
    again = {"again": NoDrafter()}
    with pytest.raises(FileNotFoundError, match="expected one with records.jsonl to go on with"):
        evaluate(target, {}, QUESTIONS, tokenizer, tmp_path, plan, resume=True)
    evaluate(target, {}, QUESTIONS, tokenizer, tmp_path, plan, settings={"model": "tiny"})
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match=r"expected one without records.jsonl, got .*; resume"):
        evaluate(target, {}, QUESTIONS, tokenizer, tmp_path, plan)
    with pytest.raises(ValueError, match=r"other are: model 'tiny' \(got 'other'\), max_new_tokens 2 \(got 3\)"):
        evaluate(target, {}, QUESTIONS, tokenizer, tmp_path, other, settings={"model": "other"}, resume=True)
    with pytest.raises(ValueError, match="other are: arms, questions"):
        evaluate(target, again, QUESTIONS[:1], tokenizer, tmp_path, plan, settings={"model": "tiny"}, resume=True)
    assert (tmp_path / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("drafters", "questions", "message"),
    [
        ({}, [], "questions: expected at least 1, got 0"),
        ({}, [QUESTIONS[0], QUESTIONS[0]], "questions: expected different names, got 1 more than once"),
        ({"transformers": NoDrafter()}, QUESTIONS, "drafters: expected names beside those of the other arms"),
    ],
)
def test_what_makes_no_evaluation_is_named(drafters, questions, message, target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        evaluate(target, drafters, questions, tokenizer, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"temperatures": ()}, "temperatures: expected at least 1"),
        ({"temperatures": (-1.0,)}, "temperatures: expected at least 0"),
        ({"temperatures": (0.0, 0.0)}, "temperatures: expected different ones"),
        ({"seeds": (1, 1)}, "seeds: expected different ones, got 1, 1"),
        ({"repeats": 0}, "repeats: expected at least 1"),
        ({"minutes": -1}, "minutes: expected at least 0"),
    ],
)
def test_a_plan_of_nothing_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        Plan(**plan)
