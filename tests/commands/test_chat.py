"""`specdec chat` and the sampling options of the command line, on the bundled model with a small template."""

import io
import json
import re

import pytest
import torch
from rich.console import Console

import specdec
from specdec.bundled.load import tiny_drafter
from specdec.commands.chat import Chat, run_chat
from specdec.commands.cli import main
from specdec.commands.common.text import CompletionStream
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.loop.rules import RULES, Naive, Rejection, Typical
from specdec.models.target.target import Target

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "# {{ message.role }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}def answer():\n{% endif %}"
)
MODEL, TOKENIZER = specdec.load_tiny()
TARGET = Target(MODEL)


def make_chat(drafter=None, *, system=None, chat_template=TEMPLATE, max_new_tokens=12, seed=None, **sampling):
    generation = {"do_sample": False, **sampling}
    return Chat(TARGET, drafter or PromptLookup(), TOKENIZER, system, chat_template, max_new_tokens, seed, generation)


def talk(chat, *lines, **console):
    """Type lines, then leave; an exception among them is raised where a line is read. Returns what was printed."""
    out = io.StringIO()
    left = iter(lines)

    def read():
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    run_chat(chat, Console(file=out, width=200, highlight=False, **console), read)
    return out.getvalue()


def expected_answer(messages, **settings):
    """What specdec.generate says after a conversation."""
    form = {"chat_template": TEMPLATE, "tokenize": False, "add_generation_prompt": True}
    text = TOKENIZER.apply_chat_template(messages, **form)
    ids = TOKENIZER(text, return_tensors="pt", add_special_tokens=False).input_ids
    settings = {"do_sample": False, "max_new_tokens": 12, **settings}
    new = specdec.generate(MODEL, None, ids, **settings)[0, ids.shape[1] :]
    return TOKENIZER.decode(new, skip_special_tokens=True)


def test_every_answer_continues_the_whole_conversation():
    chat = make_chat(system="Write Python.")
    shown = talk(chat, "a queue", "  ", "and a stack")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    for place in (2, 4):
        assert chat.messages[place]["content"] == expected_answer(chat.messages[:place])
        assert chat.messages[place]["content"] in shown
    assert len(re.findall(r"12 tokens in \d+ target passes, tau \d\.\d\d, \d+ tok/s\n", shown)) == 2


def test_reset_keeps_the_system_message_alone_and_exit_leaves():
    chat = make_chat(system="Write Python.")
    shown = talk(chat, "a queue", "/reset", "/help", "/exit", "never read")
    assert chat.messages == [{"role": "system", "content": "Write Python."}]
    assert "begins anew" in shown
    assert "/help: no such command" in shown
    assert talk(chat, "/exit") == ""


def test_ctrl_c_ends_the_answer_and_keeps_the_chat():
    class Interrupted(PromptLookup):
        steps = 0

        def draft(self, root, choose):
            Interrupted.steps += 1  # a call works with a copy
            if Interrupted.steps == 3:
                raise KeyboardInterrupt
            return super().draft(root, choose)

    attention = MODEL.config._attn_implementation
    chat = make_chat(Interrupted())
    shown = talk(chat, "a queue", KeyboardInterrupt(), "a stack")
    assert "interrupted" in shown
    assert "/exit or Ctrl-D leaves" in shown
    first, second = chat.messages[1]["content"], chat.messages[3]["content"]
    whole = expected_answer(chat.messages[:1])
    assert first
    assert whole.startswith(first)
    assert first != whole
    assert second == expected_answer(chat.messages[:3])
    assert MODEL.config._attn_implementation == attention


def test_accepted_tokens_are_coloured_and_the_targets_are_not():
    ids = TOKENIZER("return self.name").input_ids
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", no_color=False, width=200)
    stream = CompletionStream(console, TOKENIZER)
    stream.put(torch.tensor([ids[:1]]))
    stream.put(torch.tensor(ids[1:2]))
    stream.put(torch.tensor(ids[2:]))
    stream.end()
    drafted = TOKENIZER.decode(ids[2:-1])
    assert drafted
    assert re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", out.getvalue()) == [drafted]
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert text == stream.text + "\n" == TOKENIZER.decode(ids[1:]) + "\n"
    shown = talk(make_chat(PromptLookup(max_ngram=2)), "x = 1\n" * 6, force_terminal=True, color_system="standard")
    assert "\x1b[1;32m" in shown


def test_a_seed_replays_a_conversation_whose_answers_differ():
    settings = {"do_sample": True, "temperature": 1.0, "seed": 5}
    first, second = make_chat(**settings), make_chat(**settings)
    talk(first, "a queue", "/reset", "a queue")
    answer = first.messages[1]["content"]
    talk(second, "a queue")
    assert answer != second.messages[1]["content"], "the second answer has a seed of its own"
    assert second.messages[1]["content"] == expected_answer(
        second.messages[:1], do_sample=True, temperature=1.0, seed=5
    )
    talk(second, "/reset", "a queue")
    assert second.messages[1]["content"] == answer


def test_answers_end_with_the_context_and_a_full_one_is_said():
    free = TARGET.max_positions - len(TOKENIZER("# user: \ndef answer():\n").input_ids)
    words = "x " * (2 * free)
    ids = TOKENIZER(words).input_ids
    fits = TOKENIZER.decode(ids[: free - 6])
    chat = make_chat(max_new_tokens=64)
    shown = talk(chat, fits, "more")
    assert len(chat.messages) == 2
    assert int(re.search(r"(\d+) tokens in", shown).group(1)) < 64
    assert f"no room in the model's context of {TARGET.max_positions} tokens" in shown


def test_a_tokenizer_without_a_template_is_refused_with_the_way_out(capsys):
    with pytest.raises(ValueError, match="chat_template: expected one.*--chat-template with the one"):
        make_chat(chat_template=None)
    assert main(["chat", "--model", "tiny"]) == 2
    assert "--chat-template with the one" in capsys.readouterr().err
    with pytest.raises(ValueError, match="chat_template: expected one that writes this conversation, got no bad words"):
        talk(make_chat(), "bad")
    with pytest.raises(ValueError, match="chat_template: expected one that writes at least one token"):
        talk(make_chat(chat_template="{{ '' }}"), "x")


def test_chat_reads_a_pipe(tmp_path, capsys, monkeypatch):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    arguments = ["--chat-template", str(template), "--max-new-tokens", "12", "--system", "Write Python."]
    monkeypatch.setattr("sys.stdin", io.StringIO("a queue\n/reset\n"))
    assert main(["chat", "--model", "tiny", "--drafter", "medusa", *arguments]) == 0
    shown = capsys.readouterr().out
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "a queue"}]
    assert "tiny with medusa" in shown
    assert expected_answer(messages) in shown
    assert "> " not in shown
    monkeypatch.setattr("sys.stdin", io.StringIO("a queue\n"))
    assert main(["chat", "--model", "tiny", *arguments, "--temperature", "-1"]) == 2
    assert "temperature: expected a number over 0, got -1.0" in capsys.readouterr().err


def generate(capsys, *arguments):
    common = ["generate", "--model", "tiny", "--prompt", "def f(x):", "--max-new-tokens", "16", "--json"]
    status = main([*common, *arguments])
    out = capsys.readouterr()
    return json.loads(out.out) if status == 0 else out.err


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--temperature", "0.7"], {"temperature": 0.7}),
        (["--top-p", "0.8"], {"top_p": 0.8}),
        (["--top-k", "0"], {"top_k": 0}),
        (["--do-sample"], {}),
        (["--do-sample", "--acceptance", "naive", "--top-k", "3"], {"acceptance": "naive", "top_k": 3}),
    ],
)
def test_generate_samples_as_the_function_does(arguments, settings, capsys):
    record = generate(capsys, "--drafter", "draft_model", "--seed", "4", *arguments)
    ids = TOKENIZER("def f(x):", return_tensors="pt").input_ids
    source = tiny_drafter("draft_model")
    expected = specdec.generate(MODEL, source, ids, do_sample=True, seed=4, max_new_tokens=16, **settings)
    assert record["tokens"] == expected[0, ids.shape[1] :].tolist()
    assert record["lossless"] is True
    assert record["tokens"] != generate(capsys, "--drafter", "draft_model", "--seed", "5", *arguments)["tokens"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["naive", "--candidates", "drawn"], Naive(drawn=True)),
        (["naive", "--candidates", "best"], Naive()),
        (["rejection", "--replacement"], Rejection(replacement=True)),
        (["rejection", "--no-replacement"], Rejection()),
        (["typical", "--typical-threshold", "0.2"], Typical(threshold=0.2)),
        (["typical", "--typical-alpha", "0.6", "--typical-root", "sampled"], Typical(alpha=0.6, root="sampled")),
    ],
)
def test_settings_of_the_rules_are_options(arguments, rule, capsys):
    sampling = ["--temperature", "1.0", "--top-k", "0", "--seed", "4"]
    record = generate(capsys, "--drafter", "draft_model", *sampling, "--acceptance", *arguments)
    ids = TOKENIZER("def f(x):", return_tensors="pt").input_ids
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 4, "max_new_tokens": 16, "acceptance": rule}
    expected = specdec.generate(MODEL, tiny_drafter("draft_model"), ids, return_dict_in_generate=True, **settings)
    assert record["tokens"] == expected.sequences[0, ids.shape[1] :].tolist()
    assert record["tau"] == expected.stats.tau
    assert record["lossless"] is rule.lossless


def test_settings_of_drafters_are_options(capsys):
    ids = TOKENIZER("def f(x):", return_tensors="pt").input_ids
    record = generate(
        capsys, "--drafter", "prompt_lookup", "--drafter-set", "max_ngram=1", "--drafter-set", "num_draft_tokens=2"
    )
    drafter = PromptLookup(max_ngram=1, num_draft_tokens=2)
    expected = specdec.generate(MODEL, drafter, ids, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    assert record["acceptance_at_depth"] == expected.stats.acceptance_at_depth
    assert len(record["acceptance_at_depth"]) == 2


def test_temperature_0_is_greedy_and_typical_says_that_it_is_lossy(capsys):
    greedy = generate(capsys)["tokens"]
    assert generate(capsys, "--temperature", "0", "--top-p", "0.5")["tokens"] == greedy
    assert generate(capsys, "--drafter", "medusa", "--acceptance", "typical")["lossless"] is False
    common = ["generate", "--model", "tiny", "--prompt", "def f(x):", "--max-new-tokens", "16", "--drafter", "medusa"]
    assert main([*common, "--acceptance", "typical"]) == 0
    assert "tok/s, lossy (medusa, cpu, float32)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "1.5"], "top_p: expected a number over 0 and at most 1, got 1.5"),
        (["--acceptance", "rejection"], "acceptance: rejection samples, which contradicts do_sample=False"),
        (["--do-sample", "--acceptance", "rejection"], "acceptance: rejection needs a drafter that draws"),
        (["--do-sample", "--seed", "-1"], "seed: expected 0 or more, got -1"),
        (["--typical-alpha", "0.3"], "--typical-alpha: expected --acceptance typical with it, got auto"),
        (
            ["--acceptance", "naive", "--replacement"],
            "--replacement: expected --acceptance rejection with it, got naive",
        ),
        (["--acceptance", "typical", "--typical-threshold", "1.5"], "--typical-threshold: expected a number over 0"),
        (["--acceptance", "typical", "--typical-root", "sampled"], "--typical-root: expected --do-sample or"),
        (["--do-sample", "--acceptance", "naive", "--candidates", "drawn"], "acceptance: naive needs a drafter"),
        (["--drafter-set", "max_ngram"], "--drafter-set: expected KEY=VALUE, got 'max_ngram'"),
        (["--drafter-set", "tree=3"], "--drafter-set: expected a setting of the drafter, got tree; --tree is for that"),
        (["--drafter-set", "size=3"], "size: prompt_lookup has no such setting; it has max_ngram"),
    ],
)
def test_bad_sampling_options_are_named(arguments, message, capsys):
    error = generate(capsys, "--drafter", "prompt_lookup", *arguments)
    assert error.startswith("specdec: error: ")
    assert message in error


def test_the_command_offers_every_rule(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "{" + ",".join(["auto", *RULES]) + "}" in capsys.readouterr().out


def test_a_seed_is_needed_by_nobody(capsys):
    torch.manual_seed(0)
    first = generate(capsys, "--do-sample", "--top-k", "0")["tokens"]
    assert generate(capsys, "--do-sample", "--top-k", "0")["tokens"] != first


def test_generate_answers_a_user_where_it_is_told_to(capsys, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    record = generate(capsys, "--chat", "--chat-template", str(template))
    ids = TOKENIZER("# user: def f(x):\ndef answer():\n", return_tensors="pt").input_ids
    expected = specdec.generate(MODEL, None, ids, do_sample=False, max_new_tokens=16)
    assert record["tokens"] == expected[0, ids.shape[1] :].tolist()
    assert record["tokens"] != generate(capsys)["tokens"]


def test_a_user_needs_a_chat_template(capsys):
    assert main(["generate", "--model", "tiny", "--prompt", "hello", "--chat"]) == 2
    assert "chat_template: expected one" in capsys.readouterr().err
