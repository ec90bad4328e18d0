"""The commands train, distill and train-tiny, on the bundled model."""

import json
import subprocess
import sys

import pytest
import torch

import specdec
from specdec.bundled.load import TINY_FOLDER, load_tiny
from specdec.commands.cli import main

pytest.importorskip("accelerate")

LINES = [f"def f{i}(x):\n    return x + {i}\n" for i in range(12)]


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return file


def train(tmp_path, data, *arguments):
    common = ["--target", "tiny", "--data", str(data), "--output", str(tmp_path / "out"), "--max-length", "16"]
    return main(["train", *common, *arguments])


def test_train_writes_a_folder_that_generate_takes(data, tmp_path, capsys):
    options = "--set num_heads=2 --set decay=1.0 --tree 2,1 --steps 2 --batch-size 4 --learning-rate 0.001"
    options += " --eval-every 1 --held-out 0.2 --labels target"
    status = train(tmp_path, data, "--drafter", "medusa", *options.split())
    out = capsys.readouterr()
    assert status == 0, out.err
    report = json.loads(out.out)
    assert report["tau"] >= 1.0
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["settings"] == {"num_heads": 2, "decay": 1.0}
    assert (record["labels"], record["num_texts"], record["num_held_out"]) == ("target", 10, 2)
    assert (record["recipe"]["batch_size"], record["run"]["steps"]) == (4, 2)
    drafter = specdec.load_drafter(tmp_path / "out", load_tiny()[0])
    assert drafter.shape == specdec.TreeShape.from_k_config((2, 1))
    arguments = ["generate", "--model", "tiny", "--prompt", "def f(x):", "--max-new-tokens", "8", "--json"]
    assert main([*arguments, "--drafter", str(tmp_path / "out")]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    assert drafted["tokens"] == json.loads(capsys.readouterr().out)["tokens"]


def test_distill_writes_what_train_reads(data, tmp_path, capsys):
    output = tmp_path / "written.jsonl"
    arguments = ["distill", "--target", "tiny", "--data", str(data), "--output", str(output), "--max-new-tokens", "6"]
    arguments += ["--temperature", "0", "--temperature", "0.7", "--batch-size", "4", "--drafter", "medusa"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"written": 12, "present": 0, "skipped": 0}
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"written": 0, "present": 12, "skipped": 0}
    model, tokenizer = load_tiny()
    first = json.loads(output.read_text().splitlines()[0])
    ids = tokenizer(LINES[0], return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    assert first["tokens"] == expected[0].tolist()
    assert train(tmp_path, output, "--drafter", "eagle", "--steps", "1", "--batch-size", "4", "--tree", "2") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "hydro"], "drafter: expected a kind that can be trained (draft_model, medusa, "),
        (["--drafter", "medusa", "--set", "num_heads"], "--set: expected KEY=VALUE, got 'num_heads'"),
        (["--drafter", "medusa", "--set", "hats=3"], "settings: medusa does not take these: "),
        (["--drafter", "medusa", "--set", "num_heads=0"], "num_heads: expected at least 1, got 0"),
        (["--drafter", "medusa", "--steps", "0"], "steps: expected at least 1, got 0"),
        (["--drafter", "medusa", "--held-out", "nowhere.jsonl"], "owner/name:split, got nowhere.jsonl"),
        (["--drafter", "medusa", "--held-out", "2"], "held_out: expected a part of the texts between 0 and 1"),
        (["--drafter", "eagle3"], "tap_layers: expected the setting with a target of 6 layers"),
        (["--drafter", "medusa", "--tree", "no/such"], "tree: expected the name of a preset"),
    ],
)
def test_errors_are_one_line(arguments, message, data, tmp_path, capsys):
    assert train(tmp_path, data, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("specdec: error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


def test_settings_are_json_or_text():
    from specdec.commands.common.options import read_settings

    texts = ["tap_layers=[0, 2, 4]", "recurrent=false", "variant=medusa", "model=a=b"]
    settings = {"tap_layers": (0, 2, 4), "recurrent": False, "variant": "medusa", "model": "a=b"}
    assert read_settings("--set", texts) == settings


def test_train_tiny_leaves_finished_parts_alone(tmp_path, capsys):
    assert main(["train-tiny", "--output", str(TINY_FOLDER), "--work-dir", str(tmp_path), "--only", "medusa"]) == 0
    assert json.loads(capsys.readouterr().out) == {}
    assert not any(tmp_path.iterdir())
    assert main(["train-tiny", "--output", str(tmp_path), "--only", "hydro"]) == 2
    assert "only: expected some of target, draft_model, medusa, hydra, " in capsys.readouterr().err
    assert main(["train-tiny", "--output", str(tmp_path), "--only", "medusa"]) == 2
    assert "output: expected the target in" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"specdec {specdec.__version__}\n"


def test_importing_the_package_and_asking_for_kinds_stays_quick():
    code = (
        "import sys, specdec, specdec.commands.cli, specdec.drafters.kinds; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_options_of_a_run_reach_it(data, tmp_path, capsys):
    options = ("--places", "4", "--candidates", "64", "--probe-prompts", "1", "--probe-new-tokens", "4")
    assert train(tmp_path, data, "--drafter", "medusa", "--steps", "1", *options) == 0
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (record["run"]["num_places"], record["run"]["num_candidates"]) == (4, 64)
    assert record["probe"] == {"num_prompts": 1, "prompt_tokens": 256, "new_tokens": 4}
    assert "step 1 of 1: held out" in capsys.readouterr().err


def test_a_target_is_not_shared_by_one_process(data, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert train(tmp_path, data, "--drafter", "medusa", "--target-sharding", "fsdp") == 2
    assert "--target-sharding: expected several processes" in capsys.readouterr().err
