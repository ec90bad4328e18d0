"""Chat templates: those that ship, those that cannot serve, and masks that decode to exactly the answers."""

import pytest

from lib.chat_data import CALLING, MARKING, byte_tokenizer, learnt, read, template_text, word_tokenizer
from specdec.training.data.chat_templates import ChatTemplate, chat_template_text, shipped_templates

TOKENIZERS = {"bytes": byte_tokenizer, "words": word_tokenizer}


def wrapped(template, answer, end):
    return {"chatml": f"{answer}<|im_end|>", "vicuna": f" {answer}{end}", "llama2": f" {answer} {end}"}[template]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", shipped_templates())
def test_what_is_learnt_is_exactly_the_answers_and_their_ends(template, kind):
    tokenizer = TOKENIZERS[kind]()
    end = tokenizer.eos_token
    for name, answers in (
        ("ultrachat.jsonl", [["Some thirty metres.", "Up to four kilometres."], ["Some twenty metres.", "About ten."]]),
        ("sharegpt.json", [["The Loire.", "The Po."], ["2 + 3 is 5."], ["Grüß dich, Åse!"]]),
    ):
        for sample, expected in zip(read(name, template, tokenizer).samples, answers, strict=False):
            text = [part.lstrip() if kind == "words" else part for part in learnt(sample, tokenizer)]
            wanted = [wrapped(template, answer, end) for answer in expected]
            # a decoder of whole words takes the space in front of a text away
            assert text == ([part.lstrip() for part in wanted] if kind == "words" else wanted)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "chatml",
            "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\nB.<|im_end|>\n<|im_start|>user\nC?<|im_end|>\n",
        ),
        (
            "vicuna",
            "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: A? ASSISTANT: B.</s>USER: C? ",
        ),
        ("llama2", "<s>[INST] A? [/INST] B. </s><s>[INST] C? [/INST]"),
    ],
)
def test_templates_that_ship(template, text):
    turns = [{"role": role, "content": content} for role, content in zip("uau", ("A?", "B.", "C?"), strict=True)]
    turns = [turn | {"role": {"u": "user", "a": "assistant"}[turn["role"]]} for turn in turns]
    chat = ChatTemplate(word_tokenizer(), chat_template_text(template))
    assert chat.render(turns) == text
    prompts = {"chatml": "<|im_start|>assistant\n", "vicuna": "ASSISTANT:", "llama2": ""}
    assert chat.render(turns, prompting=True) == text + prompts[template]
    system = chat.render([{"role": "system", "content": "S."}, turns[0]])
    assert (
        system
        == {
            "chatml": "<|im_start|>system\nS.<|im_end|>\n<|im_start|>user\nA?<|im_end|>\n",
            "vicuna": "<s>S. USER: A? ",
            "llama2": "<s>[INST] <<SYS>>\nS.\n<</SYS>>\n\nA? [/INST]",
        }[template]
    )


def test_a_template_that_rewrites_earlier_answers_teaches_what_it_shows_of_them():
    reading = read("thinking.jsonl", "qwen3_like")
    (sample,) = reading.samples
    assert "One more than one" not in byte_tokenizer().decode(sample.tokens)
    assert learnt(sample) == [
        "Two.<|im_end|>",  # and not the word in the question behind it
        "Four.<|im_end|>",
        "<think>\nTwice four.\n</think>\n\nEight.<|im_end|>",
    ]
    assert (reading.num_answers, reading.num_hidden) == (3, 0)


def test_an_answer_that_cannot_be_found_is_not_learnt_and_the_others_are():
    dropping = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last or m.role == 'user' else '...' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    reading = read("ultrachat.jsonl", dropping)
    assert [learnt(sample) for sample in reading.samples] == [["Up to four kilometres."], ["About ten."]]
    assert (reading.num_answers, reading.num_hidden) == (4, 2)
    shouting = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' else m.content | upper }}"
        "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    reading = read("ultrachat.jsonl", shouting)
    assert learnt(reading.samples[0]) == ["SOME THIRTY METRES.</s>", "Up to four kilometres.</s>"]
    assert reading.num_hidden == 0


def test_a_template_that_marks_answers_is_taken_at_its_word():
    reading = read("ultrachat.jsonl", MARKING)
    assert learnt(reading.samples[0]) == ["Some thirty metres.<end>", "Up to four kilometres.<end>"]
    assert reading.num_hidden == 0


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('only in verse') }}", "writes questions and answers, got .* refuses them: only in verse"),
        (
            "{% for m in messages %}{{ m.content }}",
            "expected a Jinja template, got line 1: Unexpected end",
        ),
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            r"tells the user's turns .* writes '\\n' in",
        ),
        (
            "{% for m in messages if m.role == 'user' %}U {{ m.content }}{% endfor %}",
            "writes questions and answers, got",
        ),
        ("words", "writes questions and answers, got one that makes 'words' of the question"),
    ],
)
def test_a_template_that_cannot_serve_says_why(template, match):
    with pytest.raises(ValueError, match=match):
        ChatTemplate(byte_tokenizer(), template).check()


def test_a_tokenizer_without_a_template_names_those_that_ship(tmp_path):
    with pytest.raises(ValueError, match="which the tokenizer does not have, .*: chatml, llama2, vicuna, or a"):
        ChatTemplate(byte_tokenizer()).check()
    with pytest.raises(FileNotFoundError, match="expected one of chatml, llama2, vicuna, or a Jinja file, got alpaca"):
        chat_template_text("alpaca")
    (tmp_path / "own.jinja").write_text(CALLING)
    assert chat_template_text(tmp_path / "own.jinja") == CALLING
    assert "<|im_start|>" in template_text("chatml")
