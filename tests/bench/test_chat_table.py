"""The chat model's table: each drafter is measured once, and texts are compared for real."""

import json
import shutil

import pytest
import torch

from specdec.bench.chat_table import differing_texts, main
from specdec.bundled.load import TINY_FOLDER, load_tiny, tiny_drafter
from specdec.drafters.load import load_drafter
from specdec.evaluation.replay import record
from specdec.models.target.target import Target

QUESTIONS = ["def main():\n    import", "class Foo:\n    def __init__", "import os\nimport sys\n"]
SHORT = ["--num-new-tokens", "20", "--num-sampled-prompts", "2", "--num-sampled-tokens", "6"]
SHORT += ["--num-checked-tokens", "12", "--batch-size", "2", "--checked-tree", "2", "1"]


@pytest.fixture
def arguments(tmp_path):
    for name in ("eagle", "medusa"):
        shutil.copytree(TINY_FOLDER / name, tmp_path / "drafters" / name)
    lines = [json.dumps({"question_id": place, "turns": [text]}) for place, text in enumerate(QUESTIONS)]
    (tmp_path / "question.jsonl").write_text("\n".join(lines))
    places = ["--drafters", str(tmp_path / "drafters"), "--prompts", str(tmp_path / "question.jsonl")]
    return ["--model", "tiny", *places, "--output", str(tmp_path / "records.jsonl"), *SHORT]


def test_every_drafter_is_measured_once_and_a_new_one_added(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): [cell.strip() for cell in cells] for name, *cells in rows}
    assert set(found) == {"eagle", "medusa", "prompt_lookup"}
    assert [cells[-1] for cells in found.values()] == ["3 of 3"] * 3
    taus = [float(cells[2].split()[0]) for cells in found.values()]
    assert taus == sorted(taus)
    before = (tmp_path / "records.jsonl").read_text()
    records = [json.loads(line) for line in before.splitlines()]
    assert all("git_sha" in one["provenance"] for one in records if "cell" in one)

    assert main(arguments) == 0
    assert (tmp_path / "records.jsonl").read_text() == before, "nothing was due"
    shutil.copytree(TINY_FOLDER / "hydra", tmp_path / "drafters/hydra")
    assert main(arguments) == 0
    assert "`hydra`" in capsys.readouterr().out
    count = len((tmp_path / "records.jsonl").read_text().splitlines())
    shutil.copytree(TINY_FOLDER / "hydra++", tmp_path / "drafters/medusa", dirs_exist_ok=True)
    assert main(arguments) == 0
    again = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()[count:]]
    assert {one["drafter"] for one in again if "cell" in one} == {"medusa"}, "a drafter that changed is due again"
    assert "2.1 M" in capsys.readouterr().out.split("`medusa`")[1].splitlines()[0], "its last records are shown"


def test_a_text_that_differs_is_told():
    model, tokenizer = load_tiny()
    target = Target(model)
    prompts = [torch.tensor(tokenizer(text).input_ids) for text in QUESTIONS]
    recording = record(target, prompts, 12)
    drafter = load_drafter(tiny_drafter("eagle"), target)
    assert differing_texts(target, drafter, recording, 12, 2) == []
    recording.texts[2].new[7] += 1
    [found] = differing_texts(target, drafter, recording, 12, 2)
    assert (found.prompt, found.position) == (2, 7)
    assert differing_texts(target, drafter, recording, 7, 2) == []


def test_what_is_missing_is_said(capsys):
    with pytest.raises(SystemExit):
        main(["--drafters", "."])
    assert "expected --drafters, --prompts and --output, or --table" in capsys.readouterr().err
