"""`specdec demo`: says something at once, shows texts worth reading, and a table that tells the truth."""

import io
import json
import re
import subprocess
import sys
from collections import Counter

import pytest
from rich.console import Console

import specdec
from specdec.bundled.load import NAMED_MODELS, bundled_drafters, load_tiny
from specdec.commands import demo
from specdec.commands.cli import main
from specdec.commands.demo import SHOWS, demo_questions, run_demo
from specdec.evaluation import run
from specdec.evaluation.arms import Request, our_arms
from specdec.evaluation.prompts import conversation_prompt
from specdec.models.target.target import Target

TINY = load_tiny()
DRAFTERS = ("prompt_lookup", "medusa", "eagle")
ARMS = ("none", *DRAFTERS, "transformers")

# Says whether torch was there when the first line came, then presses Ctrl-C.
FIRST_LINE = """
import sys
from specdec.commands.cli import main

class Pipe:
    encoding = "utf-8"
    def write(self, text):
        if "loading" in text:
            print("torch" in sys.modules, file=sys.stderr)
            raise KeyboardInterrupt
    def flush(self):
        pass
    def isatty(self):
        return False

sys.stdout = Pipe()
sys.exit(main(["demo"]))
"""


def plain_texts(model, tokenizer, name):
    """What plain decoding says to the demo's questions, all in one batch."""
    prompts = [conversation_prompt(question, (), tokenizer) for question in demo_questions(name)]
    (plain,) = our_arms(Target(model), {})
    request = Request(SHOWS[name].max_new_tokens, 0.0, (0,) * len(prompts))
    return [tokenizer.decode(row, skip_special_tokens=True) for row in plain.run(prompts, request).tokens]


def assert_does_not_circle(text):
    """No line three times, and few runs of four words that were there before."""
    lines = Counter(line.strip() for line in text.splitlines() if len(line.strip()) > 10)
    assert max(lines.values()) < 3, text
    words = re.findall(r"\w+|[^\w\s]", text)
    runs = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    assert len(runs) > 30, text
    assert len(set(runs)) / len(runs) > 0.85, text


def shown(**settings):
    """What a short demo prints into a pipe."""
    out = io.StringIO()
    is_right = run_demo(console=Console(file=out, highlight=False), **{"max_new_tokens": 12, "repeats": 1, **settings})
    return is_right, out.getvalue()


def test_the_models_are_those_that_go_by_a_name():
    assert tuple(SHOWS) == NAMED_MODELS


def test_the_texts_do_not_circle():
    for text in plain_texts(*TINY, "tiny"):
        assert_does_not_circle(text)


@pytest.mark.smollm2
def test_the_chat_models_texts_do_not_circle(smollm2):
    for text in plain_texts(*smollm2, "smollm2"):
        assert_does_not_circle(text)


def test_a_text_that_circles_is_noticed():
    with pytest.raises(AssertionError):
        assert_does_not_circle("        self.maxsize = maxsize\n" * 12)
    with pytest.raises(AssertionError):
        assert_does_not_circle("the file is a file-like object, and " * 8)


def test_the_first_line_comes_before_torch_and_ctrl_c_leaves_no_traceback():
    done = subprocess.run([sys.executable, "-c", FIRST_LINE], capture_output=True, text=True, timeout=240)
    assert done.stderr.splitlines() == ["False", "", "interrupted"]
    assert done.returncode == 130


def test_three_drafters_write_the_same_text_then_comes_the_table():
    is_right, text = shown()
    assert is_right
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if len(line) > 80] == []
    (expected,) = {re.sub(r"\s+", " ", one) for one in streamed(text)}
    ids = conversation_prompt(demo_questions("tiny")[0], (), TINY[1])[None]
    assert (
        expected.strip()
        == re.sub(
            r"\s+", " ", TINY[1].decode(specdec.generate(TINY[0], None, ids, max_new_tokens=12, do_sample=False)[0])
        ).strip()
    )
    rows = {line.split()[0]: line for line in text[text.index("prompts, up to 12 new") :].splitlines() if line.split()}
    assert all("identical" in rows[arm] for arm in ARMS)


def streamed(text):
    """What each drafter wrote, its prompt included."""
    found = []
    for drafter in DRAFTERS:
        begin = re.search(rf"^{drafter}: .*\n", text, re.MULTILINE).end()
        found.append(text[begin : re.search(r"^\d+ tokens in ", text[begin:], re.MULTILINE).start() + begin])
    return found


def test_accepted_tokens_are_in_colour_on_a_terminal_and_marked_where_asked():
    stage = demo._load("tiny", 24, with_all=False)
    out, marked = io.StringIO(), io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system="standard", no_color=False, width=80)
    demo._stream_all(stage, terminal, is_marked=True)
    demo._stream_all(stage, Console(file=marked, highlight=False), is_marked=True)
    assert streamed(re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())) == streamed(marked.getvalue())
    texts = "".join(streamed(marked.getvalue()))
    num_accepted = texts.count("«")
    assert num_accepted >= len(DRAFTERS)
    assert len(re.findall(r"\x1b\[1;32m«", out.getvalue())) == len(re.findall("«[^»]*»", texts)) == num_accepted
    assert re.search(r"»[^«\n]", texts), "the target's own token is outside"
    unmarked = io.StringIO()
    demo._stream_all(stage, Console(file=unmarked, highlight=False), is_marked=False)
    assert "--mark" in unmarked.getvalue().splitlines()[0]
    assert streamed(unmarked.getvalue()) == [re.sub("[«»]", "", one) for one in streamed(marked.getvalue())]


def test_a_text_that_differs_is_told_by_the_exit_status(monkeypatch, capsys):
    evaluate = run.evaluate

    def wrong(*arguments, **settings):
        results, is_whole = evaluate(*arguments, **settings)
        answer = next(one for one in results.answers.values() if one.arm == "eagle")
        object.__setattr__(answer, "divergence", {"position": 1})
        return results, is_whole

    command = ["demo", "--max-new-tokens", "4", "--repeats", "1"]
    assert main(command) == 0
    monkeypatch.setattr(run, "evaluate", wrong)
    assert main(command) == 1
    assert "differ" in capsys.readouterr().out


def test_json_is_all_that_comes_out_and_a_report_is_kept(capsys, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    assert main(["demo", "--json", "--report", str(folder), "--max-new-tokens", "4", "--repeats", "1"]) == 0
    printed = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(printed.out)}
    assert set(ARMS) <= rows.keys()
    assert rows["none"]["tau"] == rows["none"]["speedup"] == 1.0
    assert rows["transformers"]["tau"] is None
    assert all(row["identical"] for row in rows.values())
    assert "specdec demo" in printed.err
    assert {"records.jsonl", "traces.jsonl", "report.html", "summary.md"} <= {file.name for file in folder.iterdir()}


def test_all_means_every_bundled_drafter():
    stage = demo._load("tiny", 4, with_all=True)
    assert stage.drafters.keys() == {"prompt_lookup", "lookahead", *bundled_drafters()}


def test_the_chat_model_is_announced_before_it_is_fetched(monkeypatch):
    monkeypatch.setattr("specdec.bundled.chat_model.cached", lambda: None)

    def unreachable(name):
        raise RuntimeError(f"{name}: no index")

    monkeypatch.setattr("specdec.bundled.load.load_model", unreachable)
    out = io.StringIO()
    with pytest.raises(RuntimeError, match="smollm2: no index"):
        run_demo("smollm2", console=Console(file=out))
    assert "fetched once, 93 MB" in out.getvalue()


def test_records_are_never_written_over(tmp_path, capsys):
    (tmp_path / "records.jsonl").write_text("{}\n")
    assert main(["demo", "--report", str(tmp_path)]) == 2
    assert "--report: expected a folder without records.jsonl" in capsys.readouterr().err
    assert (tmp_path / "records.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("option", ["--max-new-tokens", "--repeats"])
def test_numbers_below_one_are_refused(option, capsys):
    assert main(["demo", option, "0"]) == 2
    assert f"{option}: expected at least 1, got 0" in capsys.readouterr().err


def test_texts_longer_than_the_context_are_refused(capsys):
    for options in ((), ("--json",)):
        assert main(["demo", "--max-new-tokens", "5000", *options]) == 2
        printed = capsys.readouterr()
        assert re.match("specdec: error: .*5000", printed.err.splitlines()[-1])
        assert "Traceback" not in printed.err + printed.out
