"""Questions as their files have them, and prompts made of them; the rows are made up."""

import gzip
import json

import pytest

from lib.chat_data import SAMPLES, template_text
from specdec.bundled.load import TINY_FOLDER, load_tiny
from specdec.evaluation.prompts import (
    Question,
    conversation_prompt,
    first_turns,
    read_question_set,
    read_questions,
    split_by_length,
)
from specdec.training.data.samples import UnusableError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSummarise {article}"
FORMS = {
    "mt_bench": (
        '{"question_id": 81, "category": "writing", "turns": ["Name a river.", "And a lake?"]}\n\n',
        [Question("81", "writing", ("Name a river.", "And a lake?"))],
    ),
    "speed_bench": (
        '{"question_id": "a", "category": "rag", "sub_category": null, "turns": ["x?", "y?"], "multiturn": true}\n',
        [Question("a", "rag", ("x?", "y?"))],
    ),
    "speed_bench_prepared": (
        '{"question_id": "a", "category": "qa", "messages": [{"role": "user", "content": "x?"}, '
        '{"role": "user", "content": "y?"}]}\n',
        [Question("a", "qa", ("x?", "y?"))],
    ),
    "humaneval": (
        '{"task_id": "HumanEval/3", "prompt": "def add(a, b):\\n", "test": "..."}\n{"task_id": "x", "prompt": "b"}',
        [Question("HumanEval/3", "", ("def add(a, b):\n",)), Question("x", "", ("b",))],
    ),
    "gsm8k": (
        '{"question": "How many are 2 and 2?", "answer": "#### 4"}\n{"question": "And 3?", "answer": 5}\n',
        [Question("1", "", ("How many are 2 and 2?",)), Question("2", "", ("And 3?",))],
    ),
    "texts": ('["One.", "Two."]', [Question("1", "", ("One.",)), Question("2", "", ("Two.",))]),
    "lines of texts": ('"One."\n"Two."', [Question("1", "", ("One.",)), Question("2", "", ("Two.",))]),
    "rows": (' [{"prompt": "One.", "category": null, "id": null}]', [Question("1", "", ("One.",))]),
    "completions": ('{"prompt": "One", "completion": "."}', [Question("1", "", ("One",))]),
    "plain text": ('{"text": "One."}', [Question("1", "", ("One.",))]),
    "system beside": (
        '{"system": "Be brief.", "turns": ["a"]}\n{"system_prompt": "Be kind.", "prompt": "b", "response": "c"}\n'
        '{"system": "Be.", "prompt": "c"}\n{"system": " ", "prompt": "d"}',
        [
            Question("1", "", ("a",), "Be brief."),
            Question("2", "", ("b",), "Be kind."),
            Question("3", "", ("c",), "Be."),
            Question("4", "", ("d",)),
        ],
    ),
    "equal names": (
        '{"id": 7, "prompt": "a"}\n{"id": 7, "prompt": "b"}',
        [Question("7", "", ("a",)), Question("7#2", "", ("b",))],
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tiny()[1]


@pytest.fixture
def chatting(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


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


def test_conversations_that_drafters_are_trained_on_ask_what_their_users_say():
    assert read_questions(SAMPLES / "ultrachat.jsonl")[0].turns == ("How deep is a well?", "And a mine?")
    sharegpt = read_question_set(SAMPLES / "sharegpt.json", "shared")
    assert (sharegpt.name, sharegpt.left_out, len(sharegpt.sha256)) == ("shared", (), 64)
    assert sharegpt.questions[0].turns[0] == "Name a river in France."
    assert [question.system for question in sharegpt.questions] == ["", "Answer in one line.", "", "", "Be brief."]
    alpaca = read_questions(SAMPLES / "alpaca.json")
    assert [question.turns for question in alpaca[:2]] == [
        ("Name the largest planet.",),
        ("Translate into German.\n\nthe house",),
    ]


def test_parquet_is_read():
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, which comes with datasets")
    assert len(read_questions(SAMPLES / "messages.parquet")) == 2


def test_what_cannot_be_asked_is_counted_out_with_the_first_place(tmp_path, caplog):
    file = tmp_path / "chats.jsonl"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "s"}
    rows = [
        {"prompt": "yes"},
        {"messages": [user, call, {"role": "tool", "content": "4"}]},
        {"messages": [user], "tools": [{"name": "f"}]},
        {"messages": [user, system]},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"turns": [PLACEHOLDER, "b"]},
        {"tokens": [1, 2, 3]},
        {"prompt": "  "},
        {"conversations": [{"from": "gpt", "value": "x"}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_question_set(file)
    assert [question.turns for question in found.questions] == [("yes",)]
    assert {reason.text: (reason.count, reason.place) for reason in found.left_out} == {
        "with calls of functions": (2, ":2"),
        "with a system message behind the first turn": (1, ":4"),
        "with a turn of an unknown role": (1, ":5"),
        "that is a placeholder for a text of another data set": (1, ":6"),
        "of token ids": (1, ":7"),
        "with an empty prompt": (1, ":8"),
        "without a question": (1, ":9"),
    }
    assert "left out 2 of 9 texts: with calls of functions (the first at :2)" in caplog.text
    file.write_text(json.dumps(rows[5]))
    with pytest.raises(ValueError, match=r"at least one question in .*, got none of 1: .*prepare\.py of SPEED-Bench"):
        read_questions(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one question in .*question.jsonl, got none of 0: the file is empty"),
        ("[]", "the file is empty"),
        ('{"prompt": "a"}\n{"prompt": ', "question.jsonl:2: expected a JSON object, got Expecting value"),
        ('{"prompt": "a"}\n{"tex": "b"}', r"question.jsonl:2: expected turns .* got a row of no known form.* 'tex'$"),
        ('{"turns": []}', "question.jsonl:1: turns: expected texts that are not empty"),
        ('{"turns": ["a", " "]}', "expected texts that are not empty"),
        ('{"turns": "a"}', "expected texts that are not empty"),
        ('{"prompt": 3}', "question.jsonl:1: .* whose 'prompt' is no text: got int"),
        ('{"messages": "a"}', "question.jsonl:1: .* that is no list of turns"),
        ('{"tokens": "a"}', "question.jsonl:1: tokens: expected a list of ints"),
        ('["a", 3]', r"question.jsonl\[1\]: expected a JSON object or text, got int"),
        ("3", "question.jsonl:1: expected a JSON object or text, got int"),
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
    with pytest.raises(ValueError, match="chat_template: expected one, which the tokenizer does not have"):
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


def test_a_later_turn_has_the_answers_before_it(chatting):
    question = Question("1", "", ("a", "b", "c"), "s")
    texts = [chatting.decode(conversation_prompt(question, ["x", "y"][:count], chatting)) for count in range(3)]
    first = "<system>s\n<user>a\n"
    second = first + "<assistant>x\n<user>b\n"
    assert texts == [first + "<bot>", second + "<bot>", second + "<assistant>y\n<user>c\n<bot>"]
    with pytest.raises(ValueError, match="answers: expected fewer than the question's 3 turns, got 3"):
        conversation_prompt(question, ["x"] * 3, chatting)
    template = template_text("chatml")
    written = chatting.decode(conversation_prompt(question, (), chatting, chat_template=template))
    assert written.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>")


def test_without_a_template_there_is_one_turn_and_no_system_message(tokenizer):
    question = Question("1", "", ("a", "b"))
    with pytest.raises(ValueError, match="answers: expected none without a chat template, which joins turns, got 1"):
        conversation_prompt(question, ["x"], tokenizer)
    with pytest.raises(UnusableError, match="with a system message, for which a chat template is needed"):
        conversation_prompt(Question("1", "", ("a",), "s"), [], tokenizer)
    with pytest.raises(ValueError, match="question 7: with a system message"):
        first_turns([Question("7", "", ("a",), "s")], tokenizer)


def test_a_prompt_without_room_is_listed_and_never_cut_off(chatting):
    short, long = Question("1", "", ("x = 1", "y")), Question("2", "", ("x = 1 " * 20,))
    num_short = len(first_turns([short], chatting)[0])
    limits = {"max_new_tokens": 10, "context": num_short + 10}
    fitting, left = split_by_length([short, long], chatting, **limits)
    num_long = len(first_turns([long], chatting)[0])
    assert fitting == [short]
    assert [(one.question, one.num_tokens) for one in left] == [(long, num_long)]
    assert left[0].reason == (
        f"{num_long} tokens of prompt and 10 of answers are more than the context of {num_short + 10}"
    )
    assert split_by_length([short], chatting, max_new_tokens=11, context=num_short + 10)[0] == []
    both = len(conversation_prompt(short, ["."], chatting)) + 2 * 10
    for context, expected in ((both, [short]), (both - 1, [])):
        assert split_by_length([short], chatting, max_new_tokens=10, context=context, num_turns=None)[0] == expected


def test_a_question_that_the_template_refuses_is_listed(tokenizer):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no systems') }}{% endif %}" + TEMPLATE
    questions = [Question("1", "", ("a",), "s"), Question("2", "", ("a",))]
    fitting, left = split_by_length(questions, tokenizer, max_new_tokens=4, context=99, chat_template=refusing)
    assert fitting == questions[1:]
    assert left[0].reason == "a question with turns that the chat template refuses: no systems"
    assert left[0].num_tokens == 0
    with pytest.raises(ValueError, match="answers: expected none without a chat template"):
        split_by_length([Question("1", "", ("a", "b"))], tokenizer, max_new_tokens=4, context=99, num_turns=None)
    with pytest.raises(ValueError, match="num_turns: expected at least 1, got 0"):
        split_by_length(questions, tokenizer, max_new_tokens=4, context=99, num_turns=0)
