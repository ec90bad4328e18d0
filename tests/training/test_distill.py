"""What the target writes itself: prompts and conversations, by one process or several, and after interruptions."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.bundled.load import load_tiny
from specdec.jobs.prompts import read_prompts
from specdec.models.target.target import Target
from specdec.training.corpus import train_tokenizer
from specdec.training.data import read_samples
from specdec.training.distill import SelfPrompts, distill
from specdec.training.distill.continuing import continue_prompts
from specdec.training.distill.self_prompts import UserTurn

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200))
END = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (  # renders answers before the last question in another way, as templates of thinking models do
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.role == 'user' else 'so' }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = ("say f3", "again", "and f4")


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 300, 128)


def new_writer(positions, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        limits = {"vocab_size": 300, "max_position_embeddings": positions, "initializer_range": 0.3, **changes}
        config = LlamaConfig(**sizes, **limits, eos_token_id=0, pad_token_id=0, bos_token_id=0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def writer():
    return new_writer(64)


@pytest.fixture(scope="module")
def talker():
    """One whose answers end: every thirtieth token is an end token, of which the template knows one."""
    model = new_writer(300, initializer_range=0.02)
    model.generation_config.eos_token_id = [0, *range(291, 300)]
    return model


def prompts_file(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", *({"prompt": f"def f{i}(x):" + "\n" * (i % 3)} for i in range(7)))


def chat(questions=QUESTIONS):
    turns = [({"role": "user", "content": one}, {"role": "assistant", "content": "given"}) for one in questions]
    return {"messages": [message for turn in turns for message in turn]}


# Prompts


def test_the_target_continues_prompts_as_its_model_would(writer, tokenizer, tmp_path):
    output = tmp_path / "out.jsonl"
    counts = distill(writer, tokenizer, prompts_file(tmp_path), output, max_new_tokens=12, batch_size=3)
    assert counts == {"written": 7, "present": 0, "skipped": 0}
    for index, record in enumerate(lines_of(output)):
        assert record["index"] == index, "lines are in the order of the prompts"
        ids = tokenizer(record["prompt"], return_tensors="pt").input_ids
        expected = writer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert record["tokens"] == expected[0].tolist()
        assert record["prompt_length"] == ids.shape[1]
    samples = read_samples(output, tokenizer, max_length=100, vocab_size=300)
    assert len(samples) == 7, "what distill writes, train reads"


def test_a_text_ends_with_the_context_and_ends_no_other(writer, tokenizer, tmp_path):
    rows = [{"tokens": list(range(40, 40 + length)), "prompt_length": 0} for length in (60, 20, 63, 64, 59)]
    output = tmp_path / "out.jsonl"
    counts = distill(
        writer, tokenizer, write_lines(tmp_path / "in.jsonl", *rows), output, max_new_tokens=9, temperatures=(1.0,)
    )
    assert counts == {"written": 4, "present": 0, "skipped": 1}
    lines = {record["prompt_length"]: record["tokens"] for record in lines_of(output)}
    assert {start: len(tokens) - start for start, tokens in lines.items()} == {60: 4, 20: 9, 63: 1, 59: 5}
    alone = continue_prompts(Target(writer), [range(40, 60)], 9, temperature=1.0, seeds=[1])
    assert lines[20][20:] == alone[0]


def test_prompts_of_every_form_are_read(tokenizer, tmp_path, caplog):
    path = write_lines(
        tmp_path / "data.jsonl",
        {"text": "def f"},
        {"tokens": [20, 21, 22, 23], "prompt_length": 3},
        {"tokens": [20, 21, 22, 23], "spans": [[2, 3]]},
        {"messages": [{"role": "assistant", "content": "hello"}]},
        {"prompt": "ignored", **chat()},
    )
    prompts, refused = read_prompts(path, tokenizer, vocab_size=300, chat_template=TEMPLATE)
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 4]
    assert refused == {3: "a text without a question"}
    assert "left out 1 of 5 texts: without a question (the first at :4)" in caplog.text
    assert [prompt.tokens for prompt in prompts[1:3]] == [(20, 21, 22), (20, 21)]
    assert tokenizer.decode(prompts[3].tokens) == f"<user>say f3{END}\n<assistant>"
    assert [[message["content"] for message in turn] for turn in prompts[3].turns] == [[one] for one in QUESTIONS]
    (last,) = read_prompts(write_lines(path, chat()), tokenizer, vocab_size=300, chat_template=TEMPLATE, turns="last")[
        0
    ]
    assert tokenizer.decode(last.tokens).endswith(f"<assistant>given{END}\n<user>and f4{END}\n<assistant>")
    assert len(last.turns) == 1


def test_a_conversation_that_the_template_refuses_costs_itself_alone(writer, tokenizer, tmp_path):
    strict = "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    data = write_lines(tmp_path / "data.jsonl", chat(), chat(QUESTIONS[:1]))
    output = tmp_path / "out.jsonl"
    counts = distill(writer, tokenizer, data, output, max_new_tokens=2, chat_template=strict)
    assert counts == {"written": 1, "present": 0, "skipped": 1}
    assert [record["index"] for record in lines_of(output)] == [1]


# Conversations


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_of_a_conversation_is_written_in_turn(talker, tokenizer, tmp_path, temperature):
    data = write_lines(tmp_path / "data.jsonl", *(chat(QUESTIONS[: 1 + i % 3]) for i in range(9)))
    output = tmp_path / "out.jsonl"
    distill(
        talker, tokenizer, data, output, max_new_tokens=40, temperatures=(temperature,), chat_template=TEMPLATE, seed=5
    )
    ends = set(talker.generation_config.eos_token_id)
    for index, record in enumerate(lines_of(output)):
        tokens = record["tokens"]
        if index % 3 == 0:
            assert "spans" not in record, "a conversation of one answer is a prompt and its completion"
            continue
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * (1 + index % 3)
        assert [message["content"] for message in record["messages"][::2]] == list(QUESTIONS[: 1 + index % 3])
        place = 0
        for turn, (first, last) in enumerate(record["spans"]):
            question = f"<user>{QUESTIONS[turn]}{END}\n<assistant>"
            between = tokenizer.decode(tokens[place:first])
            was_ended = turn == 0 or tokens[place - 1] == 0  # the answer's own end is the template's
            assert between == (question if turn == 0 else f"\n{question}" if was_ended else f"{END}\n{question}")
            seed = 5 + index + turn * 2**32
            answer = continue_prompts(Target(talker), [tokens[:first]], 40, temperature=temperature, seeds=[seed])[0]
            foreign = answer[-1] in ends - {0} and turn < index % 3
            assert tokens[first:last] == (answer[:-1] if foreign else answer), "the target's own, token for token"
            text = tokenizer.decode(answer, skip_special_tokens=True)
            assert record["messages"][2 * turn + 1]["content"] == text
            place = last
        assert place == len(tokens)
    samples = read_samples(output, tokenizer, max_length=300, vocab_size=300)
    assert len(samples) == 9
    assert [int(sample.loss_mask.sum()) for sample in samples] == [
        sum(last - first for first, last in one.get("spans", [[one.get("prompt_length"), len(one["tokens"])]]))
        for one in lines_of(output)
    ]


def test_the_last_answer_alone_follows_the_given_ones(writer, tokenizer, tmp_path):
    data, output = write_lines(tmp_path / "data.jsonl", chat(QUESTIONS[:2])), tmp_path / "out.jsonl"
    distill(writer, tokenizer, data, output, max_new_tokens=2, chat_template=TEMPLATE, turns="last")
    (record,) = lines_of(output)
    prompt = f"<user>say f3{END}\n<assistant>given{END}\n<user>again{END}\n<assistant>"
    assert tokenizer.decode(record["tokens"][: record["prompt_length"]]) == prompt


def test_answers_that_the_template_changes_later_are_not_learnt(talker, tokenizer, tmp_path):
    data, output = write_lines(tmp_path / "data.jsonl", chat()), tmp_path / "out.jsonl"
    distill(talker, tokenizer, data, output, max_new_tokens=5, chat_template=FORGETFUL)
    (record,) = lines_of(output)
    ((first, last),) = record["spans"]
    shown = "<user>say f3</s>\n<assistant>so</s>\n<user>again</s>\n<assistant>so</s>\n<user>and f4</s>\n<assistant>"
    assert tokenizer.decode(record["tokens"][:first]) == shown
    assert last == len(record["tokens"])


def test_a_conversation_ends_before_a_question_without_room(writer, tokenizer, tmp_path):
    data, output = write_lines(tmp_path / "data.jsonl", chat()), tmp_path / "out.jsonl"
    distill(writer, tokenizer, data, output, max_new_tokens=10, chat_template=TEMPLATE)
    (record,) = lines_of(output)
    assert len(record["messages"]) == 2 * len(record["spans"]) < 6
    assert len(record["tokens"]) == record["spans"][-1][1] <= 64


# Prompts of the target's own


def test_a_users_turn_is_read_off_the_template(tokenizer):
    turn = UserTurn.of(tokenizer, TEMPLATE)
    assert (tokenizer.decode(turn.head), turn.end_token) == ("<user>", 0)
    turn = UserTurn.of(tokenizer, "{% for m in messages %}Q: {{ m.content }} A:{% endfor %}")
    assert (tokenizer.decode(turn.head), turn.end_token, turn.end_text) == ("Q:", None, "A:")
    for template, match in (
        (None, "chat_template: expected one, which the tokenizer does not have"),
        ("{{ raise_exception('no user') }}", "self_prompts: expected a chat template that takes a user's turn"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "something before and behind what a user says"),
        ("{% for m in messages %}Q{% endfor %}", "something before and behind what a user says"),
    ):
        with pytest.raises(ValueError, match=match):
            UserTurn.of(tokenizer, template)


def test_the_target_makes_its_own_prompts(talker, tmp_path):
    tokenizer = train_tokenizer([TEXT], 300, 128)
    special = [tokenizer.convert_ids_to_tokens(token) for token in range(40, 50)]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    assert tokenizer.convert_tokens_to_ids(special) == list(range(40, 50))
    data = write_lines(tmp_path / "data.jsonl", {"prompt": "def"})
    whole, cut = tmp_path / "out.jsonl", tmp_path / "cut.jsonl"
    arguments = {"self_prompts": SelfPrompts(6, 1.0, 30), "max_new_tokens": 4, "chat_template": TEMPLATE}
    counts = distill(talker, tokenizer, data, whole, batch_size=3, **arguments)
    assert counts == {"written": 7, "present": 0, "skipped": 0}
    lines = lines_of(whole)
    asked = [tokenizer.decode(record["tokens"][: record["prompt_length"]]) for record in lines[1:]]
    assert len(set(asked)) == 6
    for prompt in asked:
        assert prompt.startswith("<user>")
        assert prompt.endswith(f"{END}\n<assistant>")
        question = prompt.removeprefix("<user>").removesuffix(f"{END}\n<assistant>")
        assert question.strip() == question != ""
        assert not set(range(40, 50)) & set(tokenizer(question).input_ids)
    cut.write_text("".join(whole.read_text().splitlines(keepends=True)[:3]))
    assert distill(talker, tokenizer, data, cut, batch_size=2, **arguments)["written"] == 4
    assert cut.read_bytes() == whole.read_bytes()
    alone = tmp_path / "alone.jsonl"
    distill(talker, tokenizer, None, alone, seed=1, **arguments)
    assert [record["prompt"] for record in lines_of(alone)] == asked, "seed and index decide, and index 0 is seed 1's"
    changed = {**arguments, "self_prompts": SelfPrompts(6, 0.9, 30)}
    with pytest.raises(ValueError, match="output: expected a new file or one written with .*0.9"):
        distill(talker, tokenizer, data, cut, batch_size=2, **changed)


def test_a_turn_may_end_with_text(tmp_path):
    model, tokenizer = load_tiny()
    template = "{% for m in messages %}def {{ m.content }}({% endfor %}"
    output = tmp_path / "out.jsonl"
    how = SelfPrompts(3, 0.5, 16)
    distill(model, tokenizer, None, output, self_prompts=how, max_new_tokens=3, chat_template=template)
    for record in lines_of(output):
        assert record["prompt"].startswith("def ")
        assert record["prompt"].endswith("(")
        assert record["prompt"].count("(") == 1


def test_a_target_that_never_asks_is_an_error(writer, tokenizer, tmp_path):
    with pytest.raises(
        ValueError, match="self_prompts: expected the target to write a user's turn of at most 1 tokens"
    ):
        distill(
            writer,
            tokenizer,
            None,
            tmp_path / "out.jsonl",
            self_prompts=SelfPrompts(2, 1e-3, 1),
            chat_template=TEMPLATE,
        )
    with pytest.raises(ValueError, match="data: expected a file, self_prompts or both, got neither"):
        distill(writer, tokenizer, None, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="prompt_temperature: expected more than 0"):
        SelfPrompts(2, 0.0)


# Interruptions and several processes


def test_distillation_goes_on_where_it_stopped(writer, tokenizer, tmp_path):
    prompts, whole, cut = prompts_file(tmp_path), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    arguments = {"max_new_tokens": 10, "temperatures": (0.0, 1.0), "batch_size": 2, "seed": 3}
    distill(writer, tokenizer, prompts, whole, **arguments)
    content = whole.read_bytes()
    greedy = distill(writer, tokenizer, prompts, tmp_path / "greedy.jsonl", **{**arguments, "temperatures": (0.0,)})
    assert greedy["written"] == 7
    assert (tmp_path / "greedy.jsonl").read_bytes() != content, "half of the texts are sampled"
    end_of_third = [index for index, byte in enumerate(content) if byte == ord("\n")][2] + 1
    cut.write_bytes(content[: end_of_third + 20])  # three lines and a part of the fourth
    assert distill(writer, tokenizer, prompts, cut, **arguments) == {"written": 4, "present": 3, "skipped": 0}
    assert cut.read_bytes() == content
    assert distill(writer, tokenizer, prompts, cut, **arguments)["written"] == 0
    for changes in ({"seed": 4}, {"temperatures": (0.0, 0.5)}, {"max_new_tokens": 11}):
        with pytest.raises(ValueError, match="output: expected a new file or one written with .*, got .*cut.jsonl"):
            distill(writer, tokenizer, prompts, cut, **{**arguments, **changes})
    assert cut.read_bytes() == content


def test_what_several_processes_left_behind_is_gone_on_with(writer, tokenizer, tmp_path):
    prompts, whole = prompts_file(tmp_path), tmp_path / "whole.jsonl"
    arguments = {"max_new_tokens": 6, "batch_size": 2}
    distill(writer, tokenizer, prompts, whole, **arguments)
    lines = whole.read_bytes().splitlines(keepends=True)
    output, parts = tmp_path / "out.jsonl", [tmp_path / f"out.jsonl.part-{rank}" for rank in range(3)]
    output.write_bytes(lines[6])
    parts[0].write_bytes(lines[4] + lines[1] + lines[0][:9])
    parts[2].write_bytes(lines[3][:-1])
    assert distill(writer, tokenizer, prompts, output, **arguments) == {"written": 4, "present": 3, "skipped": 0}
    assert output.read_bytes() == whole.read_bytes()
    assert not any(part.exists() for part in parts)


def test_an_error_keeps_what_was_written(writer, tokenizer, tmp_path, monkeypatch):
    """A full disk, say: the parts stay, the output appears once all of it is there."""
    prompts, output = prompts_file(tmp_path), tmp_path / "out.jsonl"
    calls = []

    def full(file):
        calls.append(file)
        if len(calls) == 2:
            raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            distill(writer, tokenizer, prompts, output, max_new_tokens=3, batch_size=3)
    assert not output.exists()
    assert len(lines_of(tmp_path / "out.jsonl.part-0")) in (1, 2)
    assert distill(writer, tokenizer, prompts, output, max_new_tokens=3, batch_size=3)["present"] >= 1
    assert [record["index"] for record in lines_of(output)] == list(range(7))


def test_two_processes_write_the_file_of_one(tmp_path):
    data = write_lines(tmp_path / "in.jsonl", *({"prompt": f"def f{i}(x):" + "\n" * (i % 3)} for i in range(9)))
    model, tokenizer = load_tiny()
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    distill(model, tokenizer, data, alone, max_new_tokens=6, temperatures=(0.0, 0.8), batch_size=2)
    options = f"distill --target tiny --device cpu --data {data} --output {together} --max-new-tokens 6 --batch-size 2"
    options += " --temperature 0 --temperature 0.8"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launch, "-m", "specdec.commands.cli", *options.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == {"written": 9, "present": 0, "skipped": 0}, "the first process prints"
    assert together.read_bytes() == alone.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.jsonl", "in.jsonl", "together.jsonl"]
    assert "the target writes (process 1 of 2)" in run.stderr


def test_distillation_rejects(writer, tokenizer, tmp_path):
    prompts, output = prompts_file(tmp_path), tmp_path / "out.jsonl"
    for line in ('{"index": 0, "tokens": [1, 2], "prompt_length": 1}\n', '{"text": "x"}\n'):
        output.write_text(line)
        with pytest.raises(ValueError, match="output: expected a new file or one of the same prompts"):
            distill(writer, tokenizer, prompts, output)
        assert output.read_text() == line
    output.unlink()
    for arguments, match in (
        ({"temperatures": (-1.0,)}, "temperatures: expected one or more of at least 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"turns": "first"}, "turns: expected 'all' or 'last', got 'first'"),
    ):
        with pytest.raises(ValueError, match=match):
            distill(writer, tokenizer, prompts, output, **arguments)
    write_lines(prompts, {"completion": "x"})
    with pytest.raises(ValueError, match="one prompt in .*, got none of 1: 1 of no known form .the first at :1"):
        distill(writer, tokenizer, prompts, output)
    write_lines(prompts, {"text": TEXT}, {"text": "def"})
    assert distill(writer, tokenizer, prompts, output, max_new_tokens=2) == {"written": 1, "present": 0, "skipped": 1}
