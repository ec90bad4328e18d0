"""What drafters that choose at every step chose: what records keep of it, and that the page says the same."""

import json
import statistics
from dataclasses import replace

import pytest

from lib.evaluations import evaluation, planned_evaluation, write_records
from specdec.bundled.load import load_tiny, tiny_drafter
from specdec.drafters.load import load_drafter
from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.union import Union
from specdec.drafting.planning import PlannedStep, PlanReport
from specdec.evaluation.figures import figures
from specdec.evaluation.plans import short_plan
from specdec.evaluation.prompts import Question
from specdec.evaluation.records import read_results
from specdec.evaluation.report import chosen as module
from specdec.evaluation.report import write_report
from specdec.evaluation.report.chosen import chosen
from specdec.evaluation.report.found import find
from specdec.evaluation.report.numbers import NONE, interval_cell, percent, times
from specdec.evaluation.report.sections import document_of
from specdec.evaluation.run import Plan, evaluate
from specdec.models.target.target import Target

X = "\N{MULTIPLICATION SIGN}"
COSTS = WayCosts({1: 1.0, 8: 1.1, 64: 2.0}, {1: 0.02, 2: 0.1, 3: 0.12})
QUESTIONS = [
    Question("1", "classes", ("class Point:\n    def __init__(self, x, y):\n",)),
    Question("2", "classes", ("class Stack:\n",)),
    Question("3", "functions", ("def mean(values):\n",)),
]


def said(table):
    """The texts of a table's cells, notes behind them."""
    return [[f"{cell.text} {cell.note}".strip() for cell in row] for row in table.rows]


def tables_of(results):
    return {table.title: table for table in chosen(find(results)).tables}


def test_a_report_of_steps_is_kept_in_short():
    steps = (
        PlannedStep(("a", "b"), 16, 1, 3.14159, 2.0, 1.0),
        PlannedStep((), 1, 1, 1.0, 1.0, 1.0),
        PlannedStep(("b",), 4, 1, 2.0, 1.5, 1.0),
        PlannedStep(("a", "b"), 8, 1, 2.5, 1.5, 1.0),
    )
    report = PlanReport(("a", "b"), steps, (4, 1, 2, 3), (2, 5))
    plan = short_plan(report)
    assert (plan.sets, plan.chosen) == ([[0, 1], [], [1]], [0, 1, 2, 0])
    assert [plan.proposers(step) for step in range(4)] == [step.members for step in steps]
    assert (plan.num_nodes, plan.predicted) == ([16, 1, 4, 8], [3.142, 1.0, 2.0, 2.5])
    assert (plan.emitted, plan.proposed_by) == ([4, 1, 2, 3], [2, 5])
    assert (plan.predicted_tokens, plan.cost_ms) == (8.642, 6.0)
    assert (plan.predicted_speedup, plan.real_speedup) == (1.44, 1.667)
    free = short_plan(replace(report, steps=tuple(replace(step, cost_ms=0.0, plain_ms=0.0) for step in steps)))
    assert (free.cost_ms, free.predicted_speedup, free.real_speedup) == (0, None, None)


def test_the_tables_say_what_one_counts_by_hand():
    results = planned_evaluation()
    tables = tables_of(results)
    # four answers of the same five steps each
    assert said(tables["medusa, greedy decoding"]) == [
        ["plain decoding", "40 % 8", "1", "1.00", "2.00"],
        ["lookup", "20 % 4", "8", "2.25", "2.00"],
        ["lookup + medusa <b>", "20 % 4", "16", "3.50", "3.00"],
        ["medusa <b>", "20 % 4", "4", "2.75", "3.00"],
        ["all steps", "100 % 20", "4 1 to 16", "2.10", "2.40"],
    ]
    assert said(tables["What each drafter contributed, greedy decoding"]) == [
        ["medusa", "lookup", "40 %", "12 25 %", "1.50"],
        ["medusa", "medusa <b>", "40 %", "16 33 %", "2.00"],
    ]
    (measured,) = [one.speedup for one in figures(results, 0.0) if one.arm.name == "medusa"]
    cell = interval_cell(measured, is_ratio=True)
    expected = [["medusa", f"1.25{X}", f"1.50{X}", f"{cell.text} {cell.note}"]]
    assert said(tables["Speedup by the table of costs, greedy decoding"]) == expected
    assert "medusa, temperature 1" in tables


def test_speedups_of_several_answers_count_by_their_time():
    results = planned_evaluation()
    keys = [key for key in results.answers if key.arm == "medusa" and key.temperature == 0]
    for key, cost, speedup in zip(keys, (1.0, 3.0, 4.0, 8.0), (2.0, 1.0, 0.5, None), strict=True):
        one = results.answers[key]
        results.answers[key] = replace(one, plan=replace(one.plan, cost_ms=cost, real_speedup=speedup))
    title = "Speedup by the table of costs, greedy decoding"
    assert said(tables_of(results)[title])[0][2] == times((2.0 + 3.0 + 2.0) / 8.0)
    for key in keys:
        one = results.answers[key]
        results.answers[key] = replace(one, plan=replace(one.plan, cost_ms=0.0, real_speedup=None))
    assert said(tables_of(results)[title])[0][2] == NONE


def test_a_chart_is_of_the_longest_answer_of_each_category():
    results = planned_evaluation()
    (key,) = [key for key in results.answers if (key.arm, key.question, key.temperature) == ("medusa", "112", 0.0)]
    one = results.answers[key]
    results.answers[key] = replace(one, plan=replace(one.plan, emitted=[3, 2, 3, 2, 3]))
    charts = chosen(find(results)).charts
    assert [chart.title for chart in charts] == ["medusa, prompt 112 (math)", "medusa, prompt 81 (writing)"]
    assert said(charts[1].table) == [
        ["1", "lookup + medusa <b>", "16", "3.50", "3"],
        ["2", "lookup", "8", "2.25", "2"],
        ["3 to 4", "plain decoding", "1", "1.00", "3, 1"],
        ["5", "medusa <b>", "4", "2.75", "3"],
    ]
    assert "5 steps, lookup + medusa &lt;b&gt; in 1, lookup in 1, plain decoding in 2" in charts[1].svg
    assert "1 to 16 nodes; 12 tokens" in charts[1].svg
    for key, one in results.answers.items():
        results.answers[key] = replace(one, category="")
    assert len(chosen(find(results)).charts) == module.NUM_ANSWERS


def test_equal_numbers_stand_once():
    assert module._counted([1, 1, 1, 2, 1, 8, 8]) == f"3 {X} 1, 2, 1, 2 {X} 8"


def test_a_long_answer_is_drawn_as_far_as_one_can_see(monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS", 3)
    chart = chosen(find(planned_evaluation())).charts[0]
    assert chart.title.endswith(", the first 3 steps")
    assert [row[0].text for row in chart.table.rows] == ["1", "2", "3"]


def test_records_without_plans_are_read_and_reported_as_before(tmp_path):
    write_records(evaluation(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {line.pop("plan") for line in lines if line["record"] == "answer"} == {None}
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    old = read_results(tmp_path)
    assert old.answers == evaluation().answers
    assert "chosen" not in [one.name for one in document_of(find(old)).sections]
    write_report(old, tmp_path)
    (tmp_path / "now").mkdir()
    write_report(evaluation(), tmp_path / "now")
    for name in ("report.html", "summary.md"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "now" / name).read_bytes()
        assert b"What was chosen" not in (tmp_path / name).read_bytes()


def test_a_plan_comes_back_as_it_was_and_one_that_is_none_is_refused(tmp_path):
    write_records(planned_evaluation(), tmp_path)
    assert read_results(tmp_path).answers == planned_evaluation().answers
    records = tmp_path / "records.jsonl"
    records.write_text(records.read_text().replace('"emitted": [', '"came": [', 1))
    with pytest.raises(ValueError, match=r"records.jsonl:\d+: expected members.*got none of emitted"):
        read_results(tmp_path)


@pytest.fixture(scope="module")
def target():
    return Target(load_tiny()[0])


@pytest.fixture(scope="module")
def union(target):
    members = [load_drafter(source, target) for source in ("prompt_lookup", str(tiny_drafter("medusa")))]
    return Union(members, names=("lookup", "medusa"), num_nodes=16).with_costs(COSTS)


@pytest.fixture(scope="module")
def measured(target, union, tmp_path_factory):
    """The folder of a run that was killed once and went on."""
    folder, plan = tmp_path_factory.mktemp("measured"), Plan(max_new_tokens=24, with_transformers=False, num_traces=1)

    def kill(progress):
        if progress.num_done == 3:
            raise KeyboardInterrupt

    drafters, tokenizer = {"both": union}, load_tiny()[1]
    with pytest.raises(KeyboardInterrupt):
        evaluate(target, drafters, QUESTIONS, tokenizer, folder, plan, on_progress=kill)
    before = read_results(folder).answers
    results, is_whole = evaluate(target, drafters, QUESTIONS, tokenizer, folder, plan, resume=True)
    assert is_whole
    assert {key: results.answers[key] for key in before} == before
    return folder


def test_a_run_keeps_what_was_chosen_for_every_answer(measured):
    answers = read_results(measured).answers
    assert {key.arm for key, one in answers.items() if one.plan is None} == {"none"}
    plans = {key: one.plan for key, one in answers.items() if one.plan is not None}
    assert len(plans) == len(QUESTIONS)
    for key, plan in plans.items():
        assert plan.members == ["lookup", "medusa"]
        assert plan.emitted == answers[key].num_emitted
        assert 1 + sum(plan.emitted) == len(answers[key].tokens)
        assert len(plan.emitted) == len(plan.chosen) == len(plan.num_nodes) == len(plan.predicted)
        assert len({tuple(one) for one in plan.sets}) == len(plan.sets)
        assert all((size == 1) or plan.sets[one] for one, size in zip(plan.chosen, plan.num_nodes, strict=True))
        assert plan.predicted_tokens == pytest.approx(sum(plan.predicted), abs=1e-3 * len(plan.predicted))
        assert sum(plan.proposed_by) >= sum(plan.emitted) - len(plan.emitted)  # accepted draft tokens
        assert min(plan.predicted_speedup, plan.real_speedup) > 0


def test_the_page_of_a_run_has_the_numbers_of_its_records(measured):
    lines = [json.loads(line) for line in (measured / "records.jsonl").read_text().splitlines()]
    plans = [line["plan"] for line in lines if line["record"] == "answer" and line["plan"]]
    results = read_results(measured)
    section = chosen(find(results))
    sets, members, speedups = section.tables
    steps = [
        (
            " + ".join(plan["members"][member] for member in plan["sets"][place]) or "plain decoding",
            plan["num_nodes"][step],
            plan["predicted"][step],
            plan["emitted"][step],
        )
        for plan in plans
        for step, place in enumerate(plan["chosen"])
    ]
    rows = {row[0].text: row[1:] for row in sets.rows}
    assert set(rows) == {step[0] for step in steps} | ({"all steps"} if len(rows) > 1 else set())
    for name, (share, nodes, expected, came) in rows.items():
        its = [step for step in steps if name in (step[0], "all steps")]
        assert (share.text, share.note) == (percent(len(its) / len(steps)), str(len(its)))
        assert float(nodes.text) == statistics.median(step[1] for step in its)
        assert expected.text == f"{sum(step[2] for step in its) / len(its):.2f}"
        assert came.text == f"{sum(step[3] for step in its) / len(its):.2f}"
    for place, (_, name, share, accepted, _) in enumerate(members.rows):
        assert share.text == percent(sum(name.text in step[0].split(" + ") for step in steps) / len(steps))
        assert accepted.text == str(sum(plan["proposed_by"][place] for plan in plans))
    cost = sum(plan["cost_ms"] for plan in plans)
    for cell, field in zip(speedups.rows[0][1:3], ("predicted_speedup", "real_speedup"), strict=True):
        assert cell.text == times(sum(plan["cost_ms"] * plan[field] for plan in plans) / cost)
    assert len(section.charts) == 2  # categories
    write_report(results, measured)
    page = (measured / "report.html").read_text(encoding="utf-8")
    assert '<section id="chosen"' in page
    assert all(f"<figcaption>{chart.title}</figcaption>" in page for chart in section.charts)
    assert page.count('id="chosen-0-') > 0
    for chart in section.charts:  # every step once
        ends = [row[0].text.split(" to ") for row in chart.table.rows]
        assert [int(end[0]) for end in ends] == [1, *(int(end[-1]) + 1 for end in ends[:-1])]


def test_a_batch_has_one_plan(target, union, tmp_path):
    plan = Plan(max_new_tokens=6, batch_size=2, with_transformers=False, num_traces=0)
    results, _ = evaluate(target, {"both": union}, QUESTIONS[:2], load_tiny()[1], tmp_path, plan)
    first, second = (one for key, one in results.answers.items() if key.arm == "both")
    assert second.plan is None
    assert sum(first.plan.emitted) == sum(first.num_emitted) + sum(second.num_emitted)
    assert any("whole batch" in sentence for sentence in chosen(find(results)).text)
