"""bench.race_check: the kernels that a race detector must see are on its list, at sizes where they share work."""

import dataclasses
import inspect
from pathlib import Path

from lib.op_calls import LAUNCHERS
from specdec.bench.common.harness import Provider
from specdec.bench.common.journal import ended
from specdec.bench.compiled import race_check
from specdec.bench.kernels import bench_accept_rejection
from specdec.common.provenance import read_records
from specdec.kernels import accept_rejection, tree_attention
from specdec.kernels.common.weight_first import choose_splits

HANDS_OVER = ("tl.atomic_", "tl.debug_barrier", "arrives_last(", "tl.gather(", "num_stages=STAGES")
SHAPE = race_check._SHAPE


def module_of(launcher):
    return inspect.getmodule(inspect.unwrap(launcher))


def hands_over(launcher):
    """Threads or programs of its kernels hand each other data, or it changes an argument."""
    source = Path(module_of(launcher).__file__).read_text(encoding="utf-8")
    in_place = any(name.endswith("_") for name in inspect.signature(launcher).parameters)
    return in_place or any(mark in source for mark in HANDS_OVER)


def test_every_kernel_that_hands_data_over_is_on_the_list():
    wanted = {Path(module_of(launcher).__file__).stem for launcher in LAUNCHERS.values() if hands_over(launcher)}
    assert wanted >= {"tree_attention", "kv_compact", "skinny_linear", "draft_heads", "accept_rejection"}
    assert wanted <= set(race_check.OPS)


def test_the_calls_are_large_enough_to_be_split():
    model = SHAPE.model
    attention, rejection = module_of(tree_attention), module_of(accept_rejection)
    rows = SHAPE.tree.num_nodes * model.num_heads // model.num_kv_heads
    programs = SHAPE.batch * model.num_kv_heads * -(-rows // 128)
    assert attention._num_splits(programs, rows, SHAPE.context) > 1
    assert choose_splits(model.hidden_size // 64, model.hidden_size) > 1
    config = rejection._launch_config(SHAPE.tree.num_nodes, SHAPE.tree.max_depth, model.vocab_size)
    assert config.blocks["NUM_TILES"] > 1
    assert config.blocks["STAGES"] > 1


def test_all_calls_are_right(capsys):
    assert race_check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in race_check.OPS:
        assert any(line.startswith(name) for line in lines), name


def test_a_wrong_result_is_told_and_tried_again(monkeypatch, tmp_path):
    op = bench_accept_rejection.OPS["rejecting"]

    def changed(*args, **kwargs):
        verdict = op.definition(*args, **kwargs)
        return dataclasses.replace(verdict, path=verdict.path + 1)

    broken = dataclasses.replace(op, providers=dict.fromkeys(op.providers, Provider(changed)))
    monkeypatch.setitem(bench_accept_rejection.OPS, "rejecting", broken)
    monkeypatch.setattr(race_check, "OPS", ("kv_compact", "accept_rejection"))
    output = tmp_path / "x.jsonl"
    assert race_check.main(["--output", str(output)]) == 1
    right, wrong = ended(read_records(output))
    assert "failure" not in right
    assert "WrongResultError: accept_rejection_rejecting/" in wrong["failure"]
    monkeypatch.undo()
    assert race_check.main(["--output", str(output), "--resume"]) == 0
    assert [record["op"] for record in ended(read_records(output)) if "failure" in record] == []
