"""`specdec data` as a user meets it."""

import json

import pytest

from lib.chat_data import SAMPLES, byte_tokenizer, template_text
from specdec.commands.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer alone, without a model and without a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_what_would_be_learnt_is_shown(folder, capsys):
    arguments = ["data", str(SAMPLES / "sharegpt_odd.jsonl"), "--target", folder, "--chat-template", "llama2"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "1 of 12; 0 cut off at 512 tokens" in shown or "1 of 12; 0 cut off at 2,048 tokens" in shown
    assert "with an empty turn" in shown
    assert ":3" in shown
    assert "[INST] A fine conversation, is it not? [/INST]⟦ It is. <|endoftext|>⟧" in shown


def test_thoughts_that_a_template_drops_are_told_apart(folder, capsys, tmp_path):
    (tmp_path / "own.jinja").write_text(template_text("qwen3_like"))
    data = str(SAMPLES / "thinking.jsonl")
    assert main(["data", data, "--tokenizer", folder, "--chat-template", str(tmp_path / "own.jinja")]) == 0
    shown = capsys.readouterr().out
    assert "⟦Two.<|im_end|>⟧\n<|im_start|>user" in shown
    assert "⟦<think>\nTwice four.\n</think>\n\nEight.<|im_end|>⟧" in shown
    assert main(["data", data, "--target", folder, "--chat-template", "chatml", "--num-examples", "0"]) == 0
    assert "⟦" not in capsys.readouterr().out


def test_the_bundled_target_goes_by_its_name(capsys, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "def f(x):\n    return x + 1\n" * 9}) + "\n")
    assert main(["data", str(tmp_path / "texts.jsonl"), "--target", "tiny", "--max-length", "20"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1; 1 cut off at 20 tokens" in shown
    assert "20, of which 100% are learnt" in shown


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        (
            "alpaca.json",
            [],
            "with the one of the model's family: chatml, llama2, vicuna, or a Jinja",
        ),
        (
            "alpaca.json",
            ["--chat-template", "alpaca"],
            "one of chatml, llama2, vicuna, or a Jinja file, got alpaca",
        ),
        ("none.json", [], "expected a file, or a data set of the hub as owner/name:split"),
        ("", [], "expected a file, got the folder"),
        ("questions", ["--chat-template", "chatml"], "got none of 1: 1 without an answer (the first at :1)"),
        ("alpaca.json", ["--max-length", "0"], "--max-length: expected at least 1, got 0"),
    ],
)
def test_errors_are_one_line(name, options, match, folder, capsys, tmp_path):
    (tmp_path / "questions").write_text('{"messages": [{"role": "user", "content": "Who is there?"}]}\n')
    path = tmp_path / name if name == "questions" else SAMPLES / name
    assert main(["data", str(path), "--target", folder, *options]) == 2
    error = capsys.readouterr().err
    assert match in error
    assert error.count("\n") == 1
