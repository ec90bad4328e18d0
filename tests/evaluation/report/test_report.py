"""The report of an evaluation: what its page and its Markdown say, and that nothing in a text can break them."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from lib.evaluations import ARMS, AWKWARD, answer, evaluation, question, results_of, write_records
from specdec.evaluation.figures import compare_speeds
from specdec.evaluation.records import ArmInfo, read_results
from specdec.evaluation.report import write_report
from specdec.evaluation.report.found import find
from specdec.evaluation.report.headline import _counterpart
from specdec.evaluation.report.numbers import interval_cell
from specdec.evaluation.report.sections import document_of


class Page(HTMLParser):
    """What a page has: start tags, and the text inside of every element that is looked for."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.data, self._open, self.text = [], "", [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, attrs = self._open[-1] if self._open else ("", {})
        if attrs.get("id") == "answers":
            self.data += data
        elif tag not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of a report, and its page."""
    folder = tmp_path_factory.mktemp("report")
    write_report(evaluation(), folder)
    return folder, Page((folder / "report.html").read_text(encoding="utf-8"))


def section(results, name):
    (one,) = [one for one in document_of(find(results)).sections if one.name == name]
    return one


def test_the_same_records_give_the_same_bytes(report, tmp_path):
    write_records(evaluation(), tmp_path)
    write_report(read_results(tmp_path), tmp_path)
    for name in ("report.html", "summary.md"):
        assert (tmp_path / name).read_bytes() == (report[0] / name).read_bytes()


def test_the_page_needs_nothing_but_itself(report):
    _, page = report
    links = [
        attrs[name]
        for _, attrs in page.tags
        for name in ("src", "href", "xlink:href", "action", "srcset")
        if name in attrs
    ]
    assert links
    assert not [link for link in links if not link.startswith(("#", "data:"))]
    assert not re.search(r"@import|url\((?!#)", (report[0] / "report.html").read_text(encoding="utf-8"))


def test_texts_of_questions_and_tokens_stay_texts(report):
    """No element, script or comment comes out of what a model or a user wrote."""
    _, page = report
    assert not [attrs for tag, attrs in page.tags if tag == "img" or any(name.startswith("on") for name in attrs)]
    assert [tag for tag, _ in page.tags].count("script") == 3  # data, theme, traces
    data = json.loads(page.data)
    whole = {text for text in AWKWARD if text != "\ud800"}
    assert whole < set(data["strings"])
    assert AWKWARD[0] in page.text  # the question that asks about it


def test_the_data_of_the_page_are_the_records(report):
    data, results = json.loads(report[1].data), evaluation()
    shown = {}
    for arm, name, turn, temperature, seed, text, steps, trace, difference in data["answers"]:
        pieces = [data["strings"][place] for place in data["texts"][text]]
        key = (data["arms"][arm][0], data["questions"][name][0], turn, temperature, seed)
        shown[key] = (pieces, steps, trace >= 0, difference)
    expected = {
        (one.arm, one.question, one.turn, one.temperature, one.seed): (
            results.text_of(one),
            one.num_emitted or 0,
            one.key in results.traces,
            one.divergence["position"] if one.divergence else -1,
        )
        for one in results.answers.values()
    }
    assert shown == expected
    assert len(data["texts"]) < len(data["answers"])  # equal ones once


def test_a_trace_on_the_page_is_that_of_the_records(report):
    data, results = json.loads(report[1].data), evaluation()
    strings = data["strings"]
    for (is_other, first, steps), trace in zip(data["traces"], results.traces.values(), strict=True):
        assert not is_other
        assert strings[first] == trace.first
        for (parent, pieces, probs, choices, choice_probs, path, emitted), step in zip(steps, trace.steps, strict=True):
            assert (parent, path) == (step.parent, step.path)
            assert [strings[place] for place in pieces] == step.pieces
            assert [strings[place] for place in choices] == step.choices
            assert [strings[place] for place in emitted] == step.emitted
            assert [prob / 10_000 for prob in probs] == pytest.approx(step.probs, abs=5e-5)
            assert [prob / 10_000 for prob in choice_probs] == pytest.approx(step.choice_probs, abs=5e-5)


def test_the_headline_says_who_is_fastest_by_how_much_and_where():
    document = document_of(find(evaluation()))
    assert document.title == "tiny on spec_bench"
    # 52 tokens in 0.8 + 1.0 + 1.2 + 1.4 seconds instead of 8
    assert document.figures[0] == ("1.82\N{MULTIPLICATION SIGN}", "medusa, greedy decoding")
    assert "medusa is the fastest of 3 arms: 1.82" in document.headlines[0]
    assert "on 4 prompts, greedy decoding (A Processor, 2 threads)" in document.headlines[0]
    assert "temperature 1" in document.headlines[1]


def test_where_nothing_is_faster_the_headline_says_so():
    slow = [answer("none", "1", seconds=1.0), answer("medusa", "1", seconds=2.0)]
    document = document_of(find(results_of([question("1", 0)], slow, arms=ARMS[:2])))
    assert document.headlines == [
        "Nothing is faster than plain decoding on 1 prompt, greedy decoding (A Processor, 2 threads)."
    ]


def test_an_order_that_is_open_is_called_so():
    answers = [
        answer(arm, str(place), group=place, seconds=seconds)
        for place, times in enumerate([(1.0, 0.5), (1.0, 1.2)])
        for arm, seconds in zip(("none", "medusa"), times, strict=True)
    ]
    questions = [question(str(place), place) for place in range(2)]
    (sentence,) = document_of(find(results_of(questions, answers, arms=ARMS[:2]))).headlines
    assert "The interval includes 1" in sentence


def test_the_table_has_every_arm_those_that_are_missing_with_their_reason():
    greedy, sampled = section(evaluation(), "speed").tables[::2]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in greedy.rows}
    assert list(rows) == ["none", "medusa", "transformers", "eagle"]
    assert rows["medusa"] == ["11.8", "1.82\N{MULTIPLICATION SIGN}", "2.40", "76 %", "0 %", "4 of 4"]
    assert rows["transformers"][-1] == "3 of 4"
    assert "features: expected 64 values, got <128>" in greedy.rows[-1][0].note
    assert {row[-1].text for row in sampled.rows} == {"\N{EN DASH}"}  # drawn texts are not compared


def test_ours_stand_beside_what_transformers_has_for_them():
    results = evaluation()
    beside = section(results, "speed").tables[1]
    assert beside.title == "Beside transformers, greedy decoding"
    assert [tuple(cell.text for cell in row[:2]) for row in beside.rows] == [
        (arm.name, "transformers")
        for arm in results.about.arms
        if arm.library == "specdec" and arm.name not in results.missing
    ]
    ratio = compare_speeds(results, 0.0, "none", "transformers")
    assert beside.rows[0][2] == interval_cell(ratio, is_ratio=True)
    theirs = ["transformers", "transformers_prompt_lookup", "transformers_small"]
    for arm, counterpart in (
        (ArmInfo("small", "specdec", "draft_model, tree of 5 nodes"), "transformers_small"),
        (ArmInfo("lookup", "specdec", "prompt_lookup, tree of 11 nodes"), "transformers_prompt_lookup"),
        (ArmInfo("eagle", "specdec", "eagle, tree of 5 nodes"), "transformers"),
    ):
        assert _counterpart(arm, theirs) == counterpart
    assert _counterpart(ArmInfo("eagle", "specdec"), []) is None


def test_differing_texts_are_listed_with_what_explains_them():
    texts = section(evaluation(), "texts")
    ((arm, name, plain, other, place, margin, explained),) = texts.tables[0].rows
    assert (arm.text, name.text, place.text, margin.text, explained.text) == ("transformers", "112", "6", "0.25", "no")
    assert ("w5" in plain.text, "otherwise" in other.text) == (True, True)


def test_a_text_of_ours_that_rounding_does_not_explain_is_the_first_thing_one_reads():
    results = evaluation()
    (wrong,) = [one for one in results.answers.values() if one.divergence]
    changed = dataclasses.replace(wrong, arm="medusa")
    results.answers[changed.key] = changed
    assert any("medusa: 1 greedy text differs" in sentence for sentence in document_of(find(results)).warnings)
    tie = dataclasses.replace(changed, divergence={**wrong.divergence, "tolerance": 0.5})
    results.answers[tie.key] = tie
    assert not any("medusa" in sentence for sentence in document_of(find(results)).warnings)


def test_a_run_that_was_cut_off_says_how_much_it_has():
    results = evaluation()
    cut = {key: one for key, one in results.answers.items() if (one.question, one.temperature) != ("112", 1.0)}
    results.answers.clear()
    results.answers.update(cut)
    said = document_of(find(results)).warnings
    assert any("of temperature 1 it has 2 of 3 questions (67 %)" in sentence for sentence in said)
    assert not any("greedy decoding it has" in sentence for sentence in said)


def test_a_run_without_a_finished_group_has_a_page_too(tmp_path):
    write_report(results_of([question("1", 0)], []), tmp_path)
    assert "nothing to compare" in (tmp_path / "summary.md").read_text()


def test_slowest_prompts_come_first():
    slowest = section(evaluation(), "prompts").tables[0]
    speeds = [row[2].text for row in slowest.rows if row[0].text == "medusa"]
    assert speeds == ["1.43\N{MULTIPLICATION SIGN}", "1.67\N{MULTIPLICATION SIGN}", "2.22\N{MULTIPLICATION SIGN}"]


def test_markdown_keeps_rows_whole_and_markup_harmless(report):
    text = (report[0] / "summary.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert "got \\<128\\>" in text


def test_traces_beyond_what_a_page_holds_are_counted(monkeypatch):
    from specdec.evaluation.report import traces

    monkeypatch.setattr(traces, "MAX_NODES", 30)  # one trace has 25
    data = traces.trace_data(evaluation())
    assert (len(data["traces"]), data["num_traces"]) == (1, 2)


def test_without_matplotlib_the_extra_is_named_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("specdec.evaluation.report.drawing.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"specdec-triton\[eval\]"):
        write_report(evaluation(), tmp_path)
    assert not list(tmp_path.iterdir())
