"""Data as people have it: every form is read, its answers are what is learnt, and what is odd is counted out."""

import gzip
import json

import pytest

from lib.chat_data import CALLING, SAMPLES, byte_tokenizer, learnt, read, template_text
from specdec.jobs.prompts import read_prompts
from specdec.training.data import read_samples

END = "<|im_end|>"


def answers(name, template="chatml"):
    return [[part.removesuffix(END) for part in learnt(sample)] for sample in read(name, template).samples]


def test_sharegpt_as_an_array_with_every_name_of_a_role():
    assert answers("sharegpt.json") == [
        ["The Loire.", "The Po."],  # the greeting answers nothing
        ["2 + 3 is 5."],
        ["Grüß dich, Åse!"],
        ["It is blue,\nmost of the day."],
        ["Green."],
    ]
    texts = [byte_tokenizer().decode(sample.tokens) for sample in read("sharegpt.json").samples]
    assert "Welcome" not in texts[0]
    assert texts[1].startswith("<|im_start|>system\nAnswer in one line.<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?")
    assert texts[4].startswith("<|im_start|>system\nBe brief."), "a system message beside the turns belongs to them"


def test_sharegpt_as_lines_reads_as_the_array_does(tmp_path):
    rows = json.loads((SAMPLES / "sharegpt.json").read_text())
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    for array, line in zip(read("sharegpt.json").samples, read(path).samples, strict=True):
        assert array.tokens.tolist() == line.tokens.tolist()
        assert array.loss_mask.tolist() == line.loss_mask.tolist()


def test_an_odd_conversation_is_counted_out_and_never_the_file():
    reading = read("sharegpt_odd.jsonl", "llama2")
    assert [learnt(sample) for sample in reading.samples] == [[" It is. <|endoftext|>"]]
    assert (reading.num_rows, sum(part.count for part in reading.left_out)) == (12, 11)
    assert {part.text: (part.count, part.place) for part in reading.left_out} == {
        "with a turn of an unknown role": (1, ":2"),
        "with an empty turn": (2, ":3"),
        "without a question": (2, ":5"),
        "without an answer": (1, ":7"),
        "with turns that the chat template refuses": (1, ":8"),
        "of no known form": (2, ":9"),
        "that is no list of turns": (1, ":10"),
        "with a content that is no text": (1, ":11"),
    }
    details = {part.text: str(part) for part in reading.left_out}
    assert details["with a turn of an unknown role"].endswith("(the first at :2: got 'narrator')")
    assert "user and assistant have to take turns" in details["with turns that the chat template refuses"]
    assert len(read("sharegpt_odd.jsonl", "chatml").samples) == 2, "two questions in a row are ChatML's to take"


def test_ultrachat_goes_through_the_template_although_it_has_a_prompt():
    assert answers("ultrachat.jsonl") == [
        ["Some thirty metres.", "Up to four kilometres."],
        ["Some twenty metres.", "About ten."],
    ]
    prompts, _ = read_prompts(
        SAMPLES / "ultrachat.jsonl",
        byte_tokenizer(),
        vocab_size=320,
        chat_template=template_text("chatml"),
        turns="last",
    )
    first = byte_tokenizer().decode(prompts[0].tokens)
    assert first.startswith("<|im_start|>user\nHow deep is a well?<|im_end|>\n")
    assert first.endswith("<|im_start|>user\nAnd a mine?<|im_end|>\n<|im_start|>assistant\n")


def test_messages_with_systems_tools_and_parts():
    reading = read("openai.jsonl", CALLING)
    oslo, rome, moon = reading.samples
    assert learnt(oslo) == ['call weather {"city": "Oslo"}</s>', "No, 4 degrees.</s>"]
    assert learnt(rome) == ['call weather {"city": "Rome"}</s>', "Yes, 24 degrees.</s>"]
    assert learnt(moon) == ["It is round.</s>"]
    text = byte_tokenizer().decode(oslo.tokens)
    assert text.startswith("can weather\n<system>You know the weather.</s>\n<user>Is it warm\nin Oslo?</s>\n")
    assert "<tool>4 degrees</s>" in text
    assert [str(part) for part in reading.left_out] == [
        "with a part of a content that is no text (the first at :3: got one of type 'image_url')"
    ]


def test_a_template_that_writes_no_calls_cannot_teach_them():
    reasons = {part.text: part.count for part in read("openai.jsonl", "chatml").left_out}
    assert reasons["with calls of functions that the chat template does not write"] == 2


def test_alpaca_and_other_pairs_go_through_the_template():
    assert answers("alpaca.json") == [["Jupiter."], ["das Haus"], ["Seven."], ["Twelve."], ["Yes."]]
    texts = [byte_tokenizer().decode(sample.tokens) for sample in read("alpaca.json").samples]
    assert "user\nName the largest planet.<|im_end|>" in texts[0]
    assert "user\nTranslate into German.\n\nthe house<|im_end|>" in texts[1]
    assert "user\nName a prime number.\n\nIt is below ten.<|im_end|>" in texts[2]
    assert texts[4].startswith("<|im_start|>system\nYou are brief.<|im_end|>")


def test_parquet_reads_as_json_does():
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, which comes with datasets")
    assert answers("messages.parquet") == [["Honey."], ["Eggs.", "Nothing."]]


def test_a_data_set_of_the_hub_is_read_through_its_library(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))  # its tokens are kept in the user's cache
    calls = []

    class Library:
        @staticmethod
        def load_dataset(name, config, split):
            calls.append((name, config, split))
            return [{"question": "Which is it?", "answer": f"The {split} of {name}."}]

    monkeypatch.setitem(__import__("sys").modules, "datasets", Library)
    settings = {"max_length": 99, "vocab_size": 320, "chat_template": template_text("chatml")}
    for source in ("some/thing", "some/thing:test[:10]", "some/thing/main:test"):
        (sample,) = read_samples(source, byte_tokenizer(), **settings)
        assert learnt(sample)[0].startswith(f"The {calls[-1][2]} of some/thing.")
    assert list(dict.fromkeys(calls)) == [
        ("some/thing", None, "train"),
        ("some/thing", None, "test[:10]"),
        ("some/thing", "main", "test"),
    ]

    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(RuntimeError, match=r"hub needs datasets: pip install 'specdec-triton\[data\]'"):
        read_samples("some/thing", byte_tokenizer(), **settings)
    with pytest.raises(FileNotFoundError, match="expected a file, or a data set of the hub as owner/name:split"):
        read_samples(tmp_path / "none.json", byte_tokenizer(), **settings)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("plain words\n", "data:1: expected a JSON object, got Expecting value"),
        ('{"text": "x"}\n\n{', "data:3: expected a JSON object"),
        ('[{"text": "x"}, 3]', r"data\[1\]: expected a JSON object, got int"),
        ('[{"text": "x"},\n {"text": }]', r"data\[1\]: expected a JSON object, got Expecting value: line 2"),
        ('[{"text": "x"}\n {"text": "y"}]', "data:1: expected ',' or the end of the JSON array, got"),
        ('[{"text": "x"}, {"text"', r"data\[1\]: expected a JSON object"),
        ("[\n]\n", "got none of 0: the file is empty"),
        ("", "got none of 0: the file is empty"),
        (b"\xff\xfe{}", "data: expected a file of UTF-8 text"),
        ('{"tokens": [1, 2, 999], "prompt_length": 0}', None),
    ],
    ids=str,
)
def test_a_file_that_is_not_what_it_seems_is_an_error_with_its_place(content, match, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match):
        read_samples(path, byte_tokenizer(), max_length=99, vocab_size=320)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="data: expected a file, got the folder"):
        read_samples(tmp_path, byte_tokenizer(), max_length=99, vocab_size=320)


def test_a_compressed_file_reads_as_it_is_without_compression(tmp_path):
    for name in ("sharegpt.json", "openai.jsonl"):
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress((SAMPLES / name).read_bytes()))
        plain, reading = read(name), read(packed)
        assert [sample.tokens.tolist() for sample in reading.samples] == [one.tokens.tolist() for one in plain.samples]
        assert [str(part) for part in reading.left_out] == [str(part) for part in plain.left_out]
    whole = (tmp_path / "openai.jsonl.gz").read_bytes()
    for broken in (whole[: len(whole) // 2], b"{}\n", whole[:20] + bytes(20) + whole[40:]):
        packed.write_bytes(broken)
        with pytest.raises(ValueError, match=r"openai\.jsonl\.gz: expected a whole gzip file, got "):
            read(packed)
