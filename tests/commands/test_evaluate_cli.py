"""`specdec eval` as users call it, on the bundled model."""

import json

import pytest

from specdec.commands import evaluate as command
from specdec.commands.cli import main
from specdec.evaluation import run
from specdec.evaluation.records import Key, read_results

FEW = ("--max-new-tokens", "6", "--num-prompts", "2", "--traces", "1")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def evaluate(folder):
    def call(*arguments, prompts="bundled", few=FEW):
        return main(["eval", "--model", "tiny", "--prompts", str(prompts), "--output", str(folder), *few, *arguments])

    return call


def test_one_command_leaves_records_markdown_and_a_page(evaluate, folder, capsys):
    assert evaluate("--drafters", "prompt_lookup", "medusa", "small=medusa@2", "--temperature", "0", "1") == 0
    assert {file.name for file in folder.iterdir()} == {"records.jsonl", "traces.jsonl", "summary.md", "report.html"}
    told = capsys.readouterr()
    assert "small" in told.out
    table = [line for line in told.out.splitlines() if line.startswith(("none ", "small ", "transformers "))]
    assert len(table) == 6
    assert all(line.rstrip().endswith(("identical", "sampled")) for line in table)
    assert max(map(len, told.out.splitlines()[:-1])) <= 80
    assert "answers: " in told.err
    results = read_results(folder)
    assert {arm.name: arm.about.split(",")[1:2] for arm in results.about.arms}["small"] == [" tree of 3 nodes"]
    (prompts,) = results.about.settings["prompts"]
    assert (prompts["name"], len(prompts["sha256"])) == ("bundled", 64)


def test_a_drafter_that_does_not_fit_is_told_at_once_and_the_others_go_on(evaluate, folder, capsys):
    assert evaluate("--drafters", "nonsense", "smollm2/eagle", "prompt_lookup", "--without-transformers") == 1
    told = capsys.readouterr().err
    assert told.index("nonsense is not measured: drafter: expected a bundled drafter") < told.index("answers: ")
    results = read_results(folder)
    assert set(results.missing) == {"nonsense", "eagle"}
    assert {key.arm for key in results.answers} == {"none", "prompt_lookup"}


def test_a_drafter_that_is_sized_at_every_step_leaves_what_was_chosen(evaluate, folder, capsys):
    assert evaluate("--drafters", "medusa@auto", "--without-transformers", "--minutes", "0") == 0
    assert "the time is over; --resume goes on" in capsys.readouterr().err
    assert evaluate("--drafters", "medusa@auto", "--without-transformers", "--resume") == 0
    assert {file.name for file in folder.iterdir()} == {"records.jsonl", "traces.jsonl", "summary.md", "report.html"}
    answers = read_results(folder).answers
    assert len(answers) == 4
    assert {key.arm for key, one in answers.items() if one.plan is not None} == {"medusa@auto"}
    assert "## What was chosen" in (folder / "summary.md").read_text()


def test_an_interrupted_run_leaves_its_reports(evaluate, folder, monkeypatch, capsys):
    made = run._Run._answer

    def interrupted(self, *arguments):
        if len(self.results.answers) == 5:
            raise KeyboardInterrupt
        return made(self, *arguments)

    monkeypatch.setattr(run._Run, "_answer", interrupted)
    assert evaluate() == 130
    assert (folder / "report.html").exists()
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    assert evaluate() == 2
    assert "--resume) goes on with what it has" in capsys.readouterr().err
    assert evaluate("--resume") == 0
    assert len(read_results(folder).answers) == 8


def test_a_wrong_text_of_ours_fails_the_run(evaluate, folder, capsys):
    assert evaluate("--without-transformers") == 0
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    place, wrong = next(
        (place, json.loads(line)) for place, line in enumerate(lines) if json.loads(line).get("arm") == "prompt_lookup"
    )
    for margin, tolerance, status in ((1e-3, 1e-2, 0), (1.0, 1e-2, 1), (1e-6, 0.0, 1)):
        found = {"prompt": 0, "position": 1, "plain": 2, "speculative": 3, "margin": margin, "tolerance": tolerance}
        lines[place] = json.dumps({**wrong, "divergence": found}) + "\n"
        (folder / "records.jsonl").write_text("".join(lines))
        assert evaluate("--without-transformers", "--resume") == status
        assert "1 differ" in capsys.readouterr().out
    assert read_results(folder).answers[Key("prompt_lookup", wrong["question"], 1, 0.0, 0, 0)].divergence == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafters", "medusa", "a/medusa"), "--drafters: expected different names, got medusa twice"),
        (("--temperature", "-1"), "temperatures: expected at least 0, got -1"),
        (("--num-prompts", "1000"), "count: expected at most 8"),
        (("--batch-size", "0"), "batch_size: expected at least 1, got 0"),
        (("--device", "nowhere"), "device: expected one that torch can use here"),
        (("--resume",), "expected one with records.jsonl to go on with"),
    ],
)
def test_what_cannot_be_measured_is_named_and_leaves_nothing(arguments, message, evaluate, folder, capsys):
    few = () if "--num-prompts" in arguments else FEW
    assert evaluate(*arguments, few=few) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "questions.jsonl, got none of 0: the file is empty"),
        ('{"prompt": "a"}\n{"prompt": ', "questions.jsonl:2: expected a JSON object"),
        ('{"nothing": 1}', "questions.jsonl:1"),
        (None, "prompts: expected a file, one of spec_bench"),
    ],
)
def test_prompts_that_are_none_are_named(text, message, evaluate, folder, tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    if text is not None:
        file.write_text(text)
    assert evaluate(prompts=file) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_a_number_of_traces_is_a_number_or_all():
    assert command._count_or_all("all") is None
    assert command._count_or_all("3") == 3
