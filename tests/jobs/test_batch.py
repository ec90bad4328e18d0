"""Files of prompts become files of answers: of every form, after interruptions, by one process or two."""

import signal
import subprocess
import sys
import time

import pytest
import torch

import specdec
from lib.batches import (
    COMMAND,
    ENVIRONMENT,
    alone,
    answer,
    command,
    lines_of,
    prompts,
    prompts_file,
    texts_of,
    write_lines,
)
from specdec.bundled.load import load_tiny, tiny_drafter
from specdec.engine.requests import EngineClosedError, RequestFailedError
from specdec.jobs.batch import BatchSettings
from specdec.jobs.running import Ask, run_texts
from specdec.training.data.chat_templates import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


def test_answers_are_what_the_model_writes_alone_in_the_order_of_the_input(tmp_path):
    data, output = prompts_file(tmp_path, 9), tmp_path / "answers.jsonl"
    summary = answer(data, output, BatchSettings(max_new_tokens=30), drafter=tiny_drafter("medusa"))
    assert texts_of(output) == [[alone(row["prompt"], 30)] for row in prompts(9)]
    assert [line["index"] for line in lines_of(output)] == list(range(9))
    assert (summary.written, summary.present, summary.failed) == (9, 0, 0)
    answers = [one for line in lines_of(output) for one in line["answers"]]
    assert summary.num_new_tokens == sum(one["num_new_tokens"] for one in answers)
    assert all(1 < one["num_steps"] < one["num_new_tokens"] for one in answers), "medusa saves steps"
    assert summary.tau == pytest.approx(
        sum(one["num_new_tokens"] - 1 for one in answers) / sum(one["num_steps"] for one in answers)
    )
    _, tokenizer = load_tiny()
    lengths = [len(tokenizer(row["prompt"]).input_ids) for row in prompts(9)]
    assert [one["num_prompt_tokens"] for one in answers] == lengths


def test_sampled_answers_depend_on_seed_and_place_alone(tmp_path):
    data, output, other = prompts_file(tmp_path, 6), tmp_path / "answers.jsonl", tmp_path / "other.jsonl"
    settings = BatchSettings(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=7)
    answer(data, output, settings, drafter=tiny_drafter("hydra"), max_rows=6)
    answer(data, other, settings, max_rows=2)
    sampling = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0, "acceptance": "naive"}
    assert texts_of(output) == texts_of(other)
    assert texts_of(output) == [[alone(row["prompt"], 20, seed=7 + i, **sampling)] for i, row in enumerate(prompts(6))]
    assert lines_of(output)[3]["settings"]["seed"] == 10


def test_rows_of_every_form_are_answered_and_those_of_none_say_why(tmp_path):
    text, tokenizer = "class Stack:\n    def", load_tiny()[1]
    data = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": text},
        text,
        {"id": 81, "tokens": tokenizer(text).input_ids, "prompt_length": 0},
        {"question_id": "q", "turns": [text]},
        {"nothing": 1},
        {"prompt": "x = 1\n" * 400},
        {"text": text},
    )
    output = tmp_path / "out.jsonl"
    summary = answer(data, output, BatchSettings(max_new_tokens=9, chat=False))
    assert (summary.written, summary.failed) == (5, 2)
    lines = lines_of(output)
    assert [line["index"] for line in lines] == list(range(7))
    assert [line.get("name") for line in lines] == [None, None, "81", "q", None, None, None]
    assert {line["answers"][0]["text"] for line in lines if "error" not in line} == {alone(text, 9)}
    assert lines[4]["error"].startswith("a text of no known form: expected one of the keys")
    length = len(tokenizer("x = 1\n" * 400).input_ids)
    assert lines[5]["error"] == f"a prompt of {length} tokens has no room in 512"


def test_turns_follow_each_other_through_the_template(tmp_path):
    _, tokenizer = load_tiny()
    turns = ["sort a list", "and backwards"]
    data = write_lines(tmp_path / "in.jsonl", {"turns": turns, "system": "be short"}, {"prompt": turns[0]})
    output = tmp_path / "out.jsonl"
    answer(data, output, BatchSettings(max_new_tokens=12, chat=True, chat_template=TEMPLATE))
    first, single = lines_of(output)
    messages = [{"role": "system", "content": "be short"}]
    for turn, one in zip(turns, first["answers"], strict=True):
        messages.append({"role": "user", "content": turn})
        text = ChatTemplate(tokenizer, TEMPLATE).render(messages, prompting=True)
        assert one["text"] == alone(text, 12)
        messages.append({"role": "assistant", "content": one["text"]})
    rendered = ChatTemplate(tokenizer, TEMPLATE).render([{"role": "user", "content": turns[0]}], prompting=True)
    assert [one["text"] for one in single["answers"]] == [alone(rendered, 12)]


def test_a_turn_without_room_is_told_and_costs_itself_alone(tmp_path):
    data = write_lines(tmp_path / "in.jsonl", {"turns": ["sort a list", "x = 1 " * 60]}, {"turns": ["say"]})
    output = tmp_path / "out.jsonl"
    summary = answer(data, output, BatchSettings(max_new_tokens=12, max_length=100, chat_template=TEMPLATE))
    first, second = lines_of(output)
    assert first["error"] == "the last 1 of 2 turns have no room in 100 tokens"
    assert len(first["answers"]) == len(second["answers"]) == 1
    assert (summary.written, summary.failed) == (1, 1)


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(tmp_path):
    data = write_lines(tmp_path / "in.jsonl", {"turns": ["a = 1", "b = 2"]})
    output = tmp_path / "out.jsonl"
    settings = BatchSettings(max_new_tokens=40, stop=("\n",), chat_template=TEMPLATE)
    answer(data, output, settings)
    (line,) = lines_of(output)
    assert [one["finish_reason"] for one in line["answers"]] == ["stop", "stop"]
    assert all("\n" not in one["text"] for one in line["answers"])
    _, tokenizer = load_tiny()
    messages = [{"role": "user", "content": "a = 1"}, {"role": "assistant", "content": line["answers"][0]["text"]}]
    asked = ChatTemplate(tokenizer, TEMPLATE).render([*messages, {"role": "user", "content": "b = 2"}], prompting=True)
    assert line["answers"][1]["text"] == alone(asked, 40).partition("\n")[0]
    assert line["answers"][1]["num_prompt_tokens"] == len(tokenizer(asked).input_ids)


def test_a_prompt_with_nan_fails_alone_and_is_asked_again(tmp_path):
    broken, tokenizer = load_tiny()
    token = tokenizer("@").input_ids[-1]
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight.detach().clone())
    with torch.no_grad():
        broken.get_input_embeddings().weight[token] = float("nan")
    rows = [*prompts(3), {"prompt": "@"}, {"prompt": "import os\n"}]
    data, output = write_lines(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    settings = BatchSettings(max_new_tokens=8)
    summary = answer(data, output, settings, model=broken)
    assert (summary.written, summary.failed) == (4, 1)
    assert lines_of(output)[3]["error"].startswith("model: expected finite logits, got NaN")
    summary = answer(data, output, settings)
    assert (summary.written, summary.present, summary.failed) == (1, 4, 0)
    assert texts_of(output) == [[alone(row["prompt"], 8)] for row in rows]


def test_a_model_that_breaks_ends_the_job_and_loses_nothing(tmp_path, monkeypatch):
    model, _ = load_tiny()
    data, output, settings = prompts_file(tmp_path, 12), tmp_path / "out.jsonl", BatchSettings(max_new_tokens=8)
    forward, calls = type(model.model.layers[1].mlp).forward, []

    def breaks(self, *args):
        calls.append(1)
        if len(calls) > 60:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.layers[1].mlp), "forward", breaks)
        with pytest.raises(RequestFailedError, match="OutOfMemoryError"):
            answer(data, output, settings, model=model, max_rows=2)
    assert not output.exists()
    kept = len(lines_of(tmp_path / "out.jsonl.part-0"))
    assert 0 < kept < 12
    assert answer(data, output, settings).present == kept
    assert texts_of(output) == [[alone(row["prompt"], 8)] for row in prompts(12)]


def test_what_a_closed_engine_cut_off_is_no_answer():
    model, tokenizer = load_tiny()
    engine = specdec.Engine(model, tokenizer=tokenizer, max_rows=2, max_length=512)
    ended = []

    def text(count):
        result = yield Ask(tokenizer("def f(x):").input_ids, {"max_new_tokens": count, "do_sample": False})
        return {"count": len(result.tokens)}

    def close(record):
        ended.append(record)
        engine.close(finish=False)

    with pytest.raises(EngineClosedError, match="engine: expected one that stays open until all texts have ended"):
        run_texts(engine, [text(4), text(500)], close)
    assert ended == [{"count": 4}]


def test_an_output_of_other_prompts_or_settings_is_refused_and_stays(tmp_path):
    data, output, settings = prompts_file(tmp_path, 3), tmp_path / "out.jsonl", BatchSettings(max_new_tokens=4)
    answer(data, output, settings)
    content = output.read_bytes()
    with pytest.raises(ValueError, match="output: expected a new file or one written with .*'max_new_tokens': 5"):
        answer(data, output, BatchSettings(max_new_tokens=5))
    other = write_lines(tmp_path / "other.jsonl", *prompts(3)[::-1])
    with pytest.raises(ValueError, match="output: expected a new file or one of the same prompts, got .* with others"):
        answer(other, output, settings)
    assert output.read_bytes() == content
    assert answer(data, output, settings).written == 0


def test_settings_out_of_range_are_refused():
    for changes, match in (
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"temperature": -1.0}, "temperature: expected at least 0"),
        ({"top_p": 0.0}, "top_p: expected more than 0"),
        ({"top_k": 5}, "temperature: expected more than 0 with top_p 1.0, top_k 5, got 0"),
        ({"stop": ("",)}, "stop: expected texts that are not empty"),
    ):
        with pytest.raises(ValueError, match=match):
            BatchSettings(**changes)


# The command


def test_sigterm_keeps_what_was_written_and_the_same_command_goes_on(tmp_path):
    data, output = prompts_file(tmp_path, 40), tmp_path / "out.jsonl"
    options = ["--data", data, "--output", output, "--max-new-tokens", 120, "--max-rows", 4]
    process, part = command(*options), tmp_path / "out.jsonl.part-0"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (part.exists() and part.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    kept = len(lines_of(part))
    assert 0 < kept < 40
    assert "what was written is kept; the same command goes on" in told
    assert not output.exists()
    process = command(*options)
    summary, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert f'"written": {40 - kept}, "present": {kept}' in summary
    assert "tokens/s" in told
    whole = tmp_path / "whole.jsonl"
    answer(data, whole, BatchSettings(max_new_tokens=120))
    assert output.read_bytes() == whole.read_bytes()


def test_two_processes_of_torchrun_write_the_file_of_one(tmp_path):
    data, output, whole = prompts_file(tmp_path, 11), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    options = ["--data", data, "--output", output, "--max-new-tokens", 20, "--temperature", 0.8]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND[1:]]
    run = subprocess.run(
        [*launch, *map(str, options)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "(process 1 of 2): 6/6 texts" in run.stderr, "each has its share"
    assert run.stdout.count('"written": 11, "present": 0, "failed": 0') == 1, "the first process prints"
    answer(data, whole, BatchSettings(max_new_tokens=20, temperature=0.8))
    assert output.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.part-*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data", "no.jsonl"],
            "data: expected a file, or a data set of the hub as owner/name:split, got no.jsonl",
        ),
        (["--data", "in.jsonl", "--max-length", "1"], "max_length: expected 2 to 1024, the model's context, got 1"),
        (["--data", "in.jsonl", "--max-rows", "0"], "--max-rows: expected at least 1, got 0"),
        (["--data", "in.jsonl", "--drafter", "nothing"], "drafter: expected a bundled drafter of tiny"),
        (["--data", "in.jsonl", "--ray-workers", "2"], "--ray-workers: expected --ray with it, got 2 alone"),
        (["--data", "in.jsonl", "--chat"], "chat_template: expected one, which the tokenizer does not have"),
    ],
)
def test_bad_options_are_told_in_a_line(tmp_path, options, message):
    write_lines(tmp_path / "in.jsonl", *prompts(2))
    process = command(*options, "--output", "out.jsonl", cwd=tmp_path)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = [line for line in told.splitlines() if line.startswith("specdec: error")]
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
