"""Texts to learn from: files of every form, and the picture of a run."""

import json

import pytest
import torch

from lib.objectives import samples
from specdec.training.corpus import train_tokenizer
from specdec.training.data import collate, data_hash, read_samples, split_held_out
from specdec.training.runs.curves import curves_svg, history_curves

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 300, 128)


def write_lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def read(path, tokenizer, **kwargs):
    return read_samples(path, tokenizer, **{"max_length": 100, "vocab_size": 300, **kwargs})


def learnt(sample, tokenizer):
    return tokenizer.decode(sample.tokens[sample.loss_mask])


def test_every_form_of_text_is_read_and_masked(tokenizer, tmp_path):
    prompt, completion = "def f1(x):\n    ", "return x + 1\n\ndef f2(x)"
    turns = [("user", "say f3 and f4"), ("assistant", "def f3(x)"), ("user", "again"), ("assistant", "def f4(x)")]
    names = {"user": "human", "assistant": "gpt"}
    path = write_lines(
        tmp_path / "data.jsonl",
        {"text": prompt + completion},
        "",
        {"prompt": prompt, "completion": completion},
        {"prompt": "ignored", "tokens": list(range(20, 32)), "prompt_length": 5},
        {"tokens": list(range(20, 32)), "spans": [[3, 5], [9, 12]]},
        {"messages": [{"role": role, "content": text} for role, text in turns]},
        {"conversations": [{"from": "gpt", "value": "hello"}, *({"from": names[r], "value": t} for r, t in turns)]},
    )
    text, pair, tokens, spans, messages, conversation = read(path, tokenizer, chat_template=TEMPLATE)
    assert learnt(text, tokenizer) == prompt + completion
    assert learnt(pair, tokenizer) == completion
    assert tokenizer.decode(pair.tokens) == prompt + completion
    assert tokens.tokens.tolist() == list(range(20, 32))
    assert tokens.prompt_length == 5
    assert spans.loss_mask.nonzero().flatten().tolist() == [3, 4, 9, 10, 11]
    assert tokenizer.decode(messages.tokens).startswith("<user>say f3 and f4</s>\n<assistant>def f3(x)</s>")
    assert learnt(messages, tokenizer) == "def f3(x)</s>def f4(x)</s>"
    assert torch.equal(conversation.tokens, messages.tokens), "an answer to nothing is left out"


def test_long_texts_are_cut_and_short_ones_left_out(tokenizer, tmp_path, caplog):
    path = write_lines(tmp_path / "data.jsonl", {"text": TEXT}, {"text": "x"}, {"prompt": TEXT, "completion": "yes"})
    kept = read(path, tokenizer, max_length=30)
    assert [len(sample.tokens) for sample in kept] == [30]
    assert "left out 1 of 3 texts: shorter than 8 tokens" in caplog.text
    assert "left out 1 of 3 texts: with nothing to learn in the first 30 tokens" in caplog.text
    with pytest.raises(
        ValueError, match="data: expected at least one usable text in .*, got none of 2: 2 shorter than 8"
    ):
        read(write_lines(path, {"text": "x"}, {"text": "y"}), tokenizer)
    path.write_text("")
    with pytest.raises(ValueError, match="got none of 0: the file is empty"):
        read(path, tokenizer)


def test_token_files(tmp_path):
    rows = torch.arange(40).view(2, 20)
    for content in (rows, list(rows)):
        torch.save(content, tmp_path / "data.pt")
        kept = read(tmp_path / "data.pt", None)
        assert torch.equal(torch.stack([sample.tokens for sample in kept]), rows)
        assert all(sample.loss_mask.all() for sample in kept)
    for content in (rows.float(), {"a": 1}, "text"):
        torch.save(content, tmp_path / "data.pt")
        with pytest.raises(ValueError, match=r"expected a \[N, T\] tensor of token ids or a list"):
            read(tmp_path / "data.pt", None)
    (tmp_path / "data.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected a readable file of token ids"):
        read(tmp_path / "data.pt", None)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "data.jsonl:2: expected a JSON object, got "),
        ("[]", "data.jsonl:2: expected a JSON object, got list"),
        ({"tokens": [1, 2, "x"]}, "data.jsonl:2: tokens: expected a list of ints"),
        ({"tokens": [1, 2, 3], "spans": [[0, 4]]}, "data.jsonl:2: spans: expected a list of .* within 3 tokens"),
        ({"tokens": list(range(295, 305))}, "data.jsonl:2: tokens: expected ids from 0 to 299, got 304"),
        (
            {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")]},
            "data.jsonl:2: chat_template: expected one, which the tokenizer .* chatml, llama2, vicuna, or a Jinja file",
        ),
    ],
    ids=str,
)
def test_malformed_lines_are_named_by_number(line, match, tokenizer, tmp_path):
    path = write_lines(tmp_path / "data.jsonl", {"text": TEXT[:80]}, line)
    with pytest.raises(ValueError, match=match):
        read(path, tokenizer)


def test_the_hash_of_a_file_is_of_what_it_holds(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"abc")
    assert data_hash(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(FileNotFoundError, match="data: expected a file, .* got .*none.jsonl"):
        data_hash(tmp_path / "none.jsonl")


def test_held_out_texts_are_not_trained_on():
    texts = samples(10, 20)
    train_part, held_out = split_held_out(texts, 0.3, seed=1)
    assert (len(train_part), len(held_out)) == (7, 3)
    assert {id(text) for text in train_part} | {id(text) for text in held_out} == {id(text) for text in texts}
    assert [id(text) for text in split_held_out(texts, 0.3, seed=1)[1]] == [id(text) for text in held_out]


def test_batches_are_padded_on_the_right():
    texts = [*samples(1, 9, prompt=2), *samples(1, 12)]
    batch = collate(texts)
    assert batch["input_ids"].shape == (2, 12)
    assert batch["input_ids"][0].tolist() == [*texts[0].tokens.tolist(), 0, 0, 0]
    assert batch["loss_mask"].int().sum(1).tolist() == [7, 12]
    assert not batch["loss_mask"][0, 9:].any()
    assert not batch["loss_mask"][0, :2].any()


# Curves


def test_curves_are_drawn_where_there_are_values():
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5, "eval_tau": 1.5}]
    panels = history_curves(history)
    assert panels == {
        "loss": {"training": [(1, 3.0), (2, 2.0)], "held out": [(2, 2.5)]},
        "tau": {"held out": [(2, 1.5)]},
    }
    svg = curves_svg(panels, "a < b")
    assert "a &lt; b" in svg
    assert svg.count("<polyline") == 3
    assert 'points="384.0,' in svg, "step 1 of 2 is in the middle of the axis"
    assert "nan" not in curves_svg({"loss": {"x": [(0, float("nan")), (1, 2.0)]}}, "t")
    assert "<polyline" not in curves_svg({"loss": {"x": [(0, float("nan"))]}}, "t")
