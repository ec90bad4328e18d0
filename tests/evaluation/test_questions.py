"""Questions as their files have them, and prompts made of them; the rows are made up."""

import gzip
import json

import pytest

from specdec.bundled.load import TINY_FOLDER, load_tiny
from specdec.evaluation.prompts import Question, evenly, first_turns, read_questions

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
FORMS = {
    "mt_bench": (
        '{"question_id": 81, "category": "writing", "turns": ["Name a river.", "And a lake?"]}\n\n',
        [Question("81", "writing", ("Name a river.", "And a lake?"))],
    ),
    "humaneval": (
        '{"task_id": "HumanEval/3", "prompt": "def add(a, b):\\n", "test": "..."}\n{"task_id": "x", "prompt": "b"}',
        [Question("HumanEval/3", "", ("def add(a, b):\n",)), Question("x", "", ("b",))],
    ),
    "gsm8k": (
        '{"question": "How many are 2 and 2?", "answer": "#### 4"}\n',
        [Question("1", "", ("How many are 2 and 2?",))],
    ),
    "texts": ('["One.", "Two."]', [Question("1", "", ("One.",)), Question("2", "", ("Two.",))]),
    "rows": (' [{"prompt": "One."}]', [Question("1", "", ("One.",))]),
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tiny()[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_gzipped", [False, True], ids=["plain", "gzip"])
def test_every_form_is_read(form, is_gzipped, tmp_path):
    text, expected = FORMS[form]
    file = tmp_path / "question.jsonl"
    file.write_bytes(gzip.compress(text.encode()) if is_gzipped else text.encode())
    assert read_questions(file) == expected


def test_the_bundled_prompts_are_questions_too():
    assert [q.turns[0] for q in read_questions(TINY_FOLDER / "prompts.json")] == json.loads(
        (TINY_FOLDER / "prompts.json").read_text()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one question"),
        ('{"prompt": "a"}\n{"prompt": ', r"question.jsonl:2: expected JSON, got '\{\"prompt\": '"),
        ('{"prompt": "a"}\n{"text": "b"}', "question.jsonl:2: expected one of turns, prompt, question, got text"),
        ('{"turns": []}', "question.jsonl:1: expected texts that are not empty"),
        ('{"turns": ["a", " "]}', "expected texts that are not empty"),
        ('{"prompt": 3}', "expected texts that are not empty"),
        ("[3]", "expected a text or an object with one of turns, prompt, question, got int"),
    ],
)
def test_what_is_no_question_is_named(text, message, tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(file)


def test_prompts_go_through_the_chat_template(tokenizer):
    questions = [Question("1", "", ("x = 1", "y = 2"))]
    (plain,) = first_turns(questions, tokenizer)
    assert tokenizer.decode(plain, skip_special_tokens=True) == "x = 1"
    with pytest.raises(ValueError, match="chat: expected a tokenizer with a chat template"):
        first_turns(questions, tokenizer, chat=True)
    tokenizer.chat_template = TEMPLATE
    try:
        (asked,) = first_turns(questions, tokenizer)
        assert tokenizer.decode(asked) == "<user>x = 1\n<bot>"
        assert first_turns(questions, tokenizer, chat=False)[0].tolist() == plain.tolist()
        with pytest.raises(ValueError, match=f"question 1: expected at most 2 tokens, got {len(asked)}"):
            first_turns(questions, tokenizer, max_length=2)
    finally:
        tokenizer.chat_template = None


def test_some_questions_are_of_all_categories():
    questions = [Question(str(i), "abc"[i // 4], ("?",)) for i in range(12)]
    assert [q.category for q in evenly(questions, 3)] == ["a", "b", "c"]
    assert evenly(questions, None) == questions == evenly(questions, 12)
    for count, message in ((13, "at most 12"), (0, "at least 1")):
        with pytest.raises(ValueError, match=message):
            evenly(questions, count)
