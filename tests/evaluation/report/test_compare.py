"""Evaluations side by side, and the command that shows them."""

import dataclasses
import json

import pytest

from lib.evaluations import ARMS, answer, evaluation, question, results_of, write_records
from specdec.commands.cli import main
from specdec.evaluation.report.compare import compare
from specdec.evaluation.report.document import markdown


def run(speeds, *, opening="What?", **settings):
    """Three prompts, four tokens each, medusa in these seconds."""
    answers = [
        answer(arm, str(place), group=place, seconds=seconds if arm == "medusa" else 1.0)
        for place, seconds in enumerate(speeds)
        for arm in ("none", "medusa")
    ]
    questions = [question(str(place), place, opening=opening) for place in range(len(speeds))]
    return results_of(questions, answers, arms=ARMS[:2], **settings)


def rows_of(document, name):
    (section,) = [one for one in document.sections if one.name == name]
    return {row[0].text: row[1:] for table in section.tables for row in table.rows}


def text_of(document, name):
    (section,) = [one for one in document.sections if one.name == name]
    return " ".join(section.text)


def test_arms_of_both_are_compared_prompt_by_prompt():
    document = compare({"old": run([0.5, 0.6, 0.7]), "new": run([0.25, 0.3, 0.35])})
    cells = [cell.text for cell in rows_of(document, "speed-1")["medusa"]]
    # 12 tokens in 1.8 and in 0.9 seconds
    assert cells[:3] == ["6.7", "13.3", "2.00\N{MULTIPLICATION SIGN}"]
    assert rows_of(document, "speed-1")["medusa"][2].note == "[2.00, 2.00]"  # twice as fast on each
    assert "paired intervals over the same prompts" in text_of(document, "speed-1")
    assert "new is faster than old in 1 of 2 arms, slower in 0, and open in 1" in document.headlines[0]


def test_of_other_prompts_intervals_are_unpaired_and_called_so():
    document = compare({"old": run([0.5, 0.6, 0.7]), "new": run([0.25, 0.3, 0.35], opening="Why?")})
    ratio = rows_of(document, "speed-1")["medusa"][2]
    assert ratio.text == "2.00\N{MULTIPLICATION SIGN}"
    assert ratio.note != "[2.00, 2.00]"
    assert "unpaired" in text_of(document, "speed-1")
    assert "no greedy answer to the same question" in text_of(document, "texts-1")


def test_prompts_that_both_have_are_compared():
    document = compare({"old": run([0.5, 0.6, 0.7]), "new": run([0.25, 0.3])})
    assert "the 2 groups of prompts that both have" in text_of(document, "speed-1")
    assert rows_of(document, "speed-1")["medusa"][2].note == "[2.00, 2.00]"


def test_what_else_differs_is_listed_and_nothing_else():
    first, second = run([0.5, 0.6]), run([0.5, 0.6], max_new_tokens=7)
    second.sessions[0] |= {"git_sha": "f" * 40, "utc": "2026-11-23T00:00:00+00:00"}
    rows = rows_of(compare({"old": first, "new": second}), "apart-1")
    assert {name: [cell.text for cell in row] for name, row in rows.items()} == {
        "max new tokens": ["\N{EN DASH}", "7"],
        "commit": ["0123456789ab", "f" * 12],
    }


def test_texts_that_changed_are_listed():
    first, second = run([0.5, 0.6]), run([0.5, 0.6])
    (changed,) = [one for one in second.answers.values() if (one.arm, one.question) == ("medusa", "1")]
    changed = dataclasses.replace(changed, tokens=[5, 6, 9, 8], pieces=["a", "b", "x", "d"])
    second.answers[changed.key] = changed
    document = compare({"old": first, "new": second})
    assert text_of(document, "texts-1") == "Of 4 greedy texts that both have 1 differs."
    (cells,) = rows_of(document, "texts-1").values()
    assert ("c" in cells[1].text, "x" in cells[2].text, cells[3].text) == (True, True, "3")
    same = compare({"old": first, "new": first})
    assert "are the same, token for token" in text_of(same, "texts-1")


def test_several_runs_are_compared_with_the_first():
    document = compare({"a": run([0.5, 0.6]), "b": run([0.4, 0.5]), "c": run([0.3, 0.4])})
    assert document.title == "b and c against a"
    assert [one.name for one in document.sections if one.name.startswith("speed")] == ["speed-1", "speed-2"]


@pytest.fixture
def folders(tmp_path):
    """Two evaluations on file."""
    for name, seconds in (("one", 0.5), ("two", 0.4)):
        write_records(run([seconds, seconds + 0.1]), tmp_path / name)
    return tmp_path / "one", tmp_path / "two"


def test_the_command_prints_or_writes_a_comparison(folders, tmp_path, capsys):
    assert main(["report", *map(str, folders)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# two against one\n")
    for name in ("c.md", "c.html"):
        assert main(["report", *map(str, folders), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "c.md").read_text(encoding="utf-8") == said
    assert "two against one" in (tmp_path / "c.html").read_text(encoding="utf-8")


def test_the_command_makes_a_report_anew(tmp_path):
    write_records(evaluation(), tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_bytes()
    (tmp_path / "report.html").write_text("old")
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_bytes() == page


def spoiled(folder, fault):
    """The folder's records with a fault."""
    file = folder / "records.jsonl"
    lines = file.read_text().splitlines()
    if fault == "version":
        lines[0] = json.dumps({**json.loads(lines[0]), "format": 99})
    elif fault == "corrupt":
        lines[2] = lines[2][: len(lines[2]) // 2]
    elif fault == "field":
        line = json.loads(lines[2])
        del line["seconds"]
        lines[2] = json.dumps(line)
    elif fault == "arm":
        line = json.loads(lines[2])
        lines[2] = json.dumps({**line, "arm": "nobody"})
    elif fault == "plain":
        lines = [line for line in lines if '"arm": "none", "question": "0"' not in line]
    file.write_text("".join(f"{line}\n" for line in lines) if fault != "empty" else "")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("version", "records.jsonl:1: expected records of format 1, got 99; measure anew"),
        ("corrupt", "records.jsonl:3: expected a JSON object"),
        ("field", "got none of seconds"),
        ("arm", "records.jsonl:3: expected an arm of the first line, got 'nobody'"),
        ("plain", "expected plain decoding's answer to 0, turn 1, got none"),
        ("empty", "expected the first line of an evaluation"),
    ],
)
def test_folders_that_cannot_be_read_end_in_one_line(folders, capsys, fault, said):
    before = folders[0] / "report.html"
    before.write_text("good")
    spoiled(folders[0], fault)
    assert main(["report", str(folders[0])]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert before.read_text() == "good"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "expected one of 'specdec eval' with records.jsonl"),
        (["one", "--output", "x.html"], "expected several folders"),
        (["one", "two", "--output", "x.pdf"], "expected a file that ends in .html or .md"),
        (["one", "one"], "expected different ones"),
    ],
)
def test_wrong_arguments_end_in_one_line(folders, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(folders[0].parent)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_comparison_keeps_what_it_says_in_markdown():
    text = markdown(compare({"a|b": run([0.5, 0.6]), "c": run([0.4, 0.5])}))
    assert "tok/s, a\\|b" in text
