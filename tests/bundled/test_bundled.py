"""The bundled model, its drafters and the command line, as a new user meets them."""

import json
import subprocess
import sys

import pytest
import torch

import specdec
from specdec.bundled.load import TINY_FOLDER, bundled_drafters, load_tiny, tiny_drafter
from specdec.commands.cli import main
from specdec.common.text_pieces import TextPieces

PROMPTS = json.loads((TINY_FOLDER / "prompts.json").read_text())
# Least tau on every other prompt, 48 new tokens: about a tenth below what was measured.
TAU = {
    "prompt_lookup": 2.6,
    "lookahead": 1.6,
    "draft_model": 2.1,
    "medusa": 1.8,
    "hydra": 1.9,
    "hydra++": 2.2,
    "eagle": 2.5,
    "eagle3": 2.6,
    "mtp": 2.8,
    "amphista": 1.9,
    "parallelspec": 2.0,
    "parallelspec_medusa": 1.6,
    "falcon": 1.6,
    "dflash": 1.3,
    "peagle": 1.5,
    "dspark": 1.6,
}


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "lookahead", *bundled_drafters()])
def test_every_bundled_drafter_gives_the_text_of_transformers(tiny, drafter):
    model, tokenizer = tiny
    source = tiny_drafter(drafter) if drafter in bundled_drafters() else drafter
    for text in PROMPTS[:3]:
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)
        assert torch.equal(specdec.generate(model, source, ids, max_new_tokens=48), expected)


def test_acceptance_of_the_bundled_drafters_stays_in_its_band(tiny):
    """A change that halves acceptance keeps the text right; only this test sees it."""
    model, tokenizer = tiny
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in PROMPTS[::2]]
    tau = {}
    for drafter in TAU:
        source = tiny_drafter(drafter) if drafter in bundled_drafters() else drafter
        report = specdec.check(model, source, prompts, max_new_tokens=48)
        assert report.identical, report
        tau[drafter] = report.tau
    assert tau.keys() == {"prompt_lookup", "lookahead", *bundled_drafters()}
    assert all(tau[drafter] > least for drafter, least in TAU.items()), tau


def test_the_bundled_model_writes_python(tiny):
    model, tokenizer = tiny
    ids = tokenizer("class Queue:\n    def __init__(self, maxsize=0):", return_tensors="pt").input_ids
    text = tokenizer.decode(specdec.generate(model, None, ids, max_new_tokens=48)[0])
    assert "self." in text.split("):", 1)[1]


def test_bundled_files_are_within_their_budget():
    drafters = [path for path in TINY_FOLDER.rglob("*.safetensors") if path.parent.name != "target"]
    assert drafters
    assert sum(path.stat().st_size for path in drafters) <= 40e6


def test_the_tokenizer_gives_every_text_back(tiny):
    _, tokenizer = tiny
    for text in ("def f(x):\n        return x\r\n\n\t# é 日本 🙂\x00", " \n \n", "a  b   c"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_text_pieces_join_to_the_whole_text(tiny):
    _, tokenizer = tiny
    text = "x = '日本 🙂'\n    y = 2\n"
    ids = tokenizer(text).input_ids
    pieces = TextPieces(tokenizer, ids[:2])
    parts = [pieces.add(token) for token in ids[2:]]
    assert "".join(parts) + pieces.rest() == text[len(tokenizer.decode(ids[:2])) :]
    assert "" in parts, "an unfinished character must wait"


def test_generate_as_json_and_as_text(capsys):
    arguments = ["generate", "--model", "tiny", "--prompt", PROMPTS[1], "--max-new-tokens", "20"]
    records = {}
    for drafter in ("none", "medusa", "draft_model", "prompt_lookup"):
        assert main([*arguments, "--drafter", drafter, "--json"]) == 0
        records[drafter] = json.loads(capsys.readouterr().out)
    assert len({record["text"] for record in records.values()}) == 1
    assert records["none"]["tau"] == 1.0
    assert records["medusa"]["lossless"] is True
    assert records["medusa"]["num_target_passes"] < 19
    assert main([*arguments, "--drafter", "draft_model", "--tree", "3,2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(PROMPTS[1])
    assert records["none"]["text"] in shown
    assert "tau" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny", "--prompt", ""], "--prompt: expected at least one token"),
        (
            ["--model", "tiny", "--prompt", "x", "--drafter", "medusa", "--tree", "9"],
            "tree: expected a depth of at most 3",
        ),
        (["--model", "tiny", "--prompt", "x", "--drafter", "draft_model", "--tree", "no/such"], "no/such"),
        (["--model", "tiny", "--prompt", "x", "--max-new-tokens", "5000"], "max_new_tokens: expected 1 to"),
        (["--model", "tiny", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--model", "tiny", "--prompt", "x", "--drafter", "./nowhere"], "drafter: expected a kind"),
    ],
)
def test_errors_of_the_command_line_are_one_line(arguments, message, capsys):
    assert main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specdec: error: ")
    assert message in error
    assert "Traceback" not in error


def test_the_installed_command_runs_from_anywhere(tmp_path):
    command = [
        sys.executable,
        "-m",
        "specdec.commands.cli",
        "generate",
        "--model",
        "tiny",
        "--prompt",
        "import",
        "--max-new-tokens",
        "4",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 4


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "xpu"])
def test_a_device_that_is_not_there_is_refused_in_words(device):
    with pytest.raises(ValueError, match=f"device: expected one that torch can use here, got '{device}': "):
        specdec.load_model("tiny", device=device)


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere/model", "/no/where", "a/b/c"])
def test_a_folder_that_is_not_there_is_told_from_a_hub_id(name):
    with pytest.raises(FileNotFoundError, match="model: expected one of tiny, smollm2, a folder or a hub id, got "):
        specdec.load_model(name)
