"""The short trainings behind the papers' ablations: all that the claims ask for, and nothing is trained twice."""

import json

from specdec.bench import paper_runs
from specdec.bench.claims.runs import SHORT_RUNS
from specdec.bench.claims.table import CLAIMS
from specdec.bundled.load import load_tiny
from specdec.models.target.target import Target
from specdec.training.kinds import objective_class


def test_every_ablation_of_a_claim_has_a_training():
    asked = {arm.drafter for rows in CLAIMS.values() for claim in rows for arm in (claim.ours, claim.theirs)}
    assert {name for name in asked if name.startswith("short-")} == set(SHORT_RUNS)


def test_no_setting_is_unknown():
    target = Target(load_tiny()[0])
    for run in SHORT_RUNS.values():
        objective_class(run.kind).new(target, **run.settings)


def test_what_is_there_is_left_alone(tmp_path, capsys):
    data, output = tmp_path / "texts.jsonl", tmp_path / "runs"
    texts = [f"def f{n}(a, b):\n    return a + {n} * b\n" * 3 for n in range(24)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output.joinpath("short-hydra.seed1").mkdir(parents=True)
    only = ["--only", "short-hydra", "short-parallelspec-foreign", "--seeds", "0", "4"]
    options = ["--target", "tiny", "--data", str(data), "--output", str(output), "--steps", "2", "--batch-size", "2"]
    assert paper_runs.main([*options, *only, "--max-length", "48"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 4: short-hydra: tau 1." in shown
    assert "2 of 4: short-parallelspec-foreign: no --foreign" in shown
    assert "3 of 4: short-hydra.seed1: there" in shown
    assert sorted(path.name for path in output.iterdir()) == ["short-hydra", "short-hydra.seed1", "work"]
