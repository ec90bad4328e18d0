"""The committed table of launches and bytes, and the counter behind it."""

import json
import re

import pytest
import torch

from specdec.bench import launches
from specdec.bench.common.shapes import LLAMA_2_7B, TINY
from specdec.bench.compiled.launch_counter import count_step
from specdec.bench.decoding.simulated import DRAFTERS, random_drafter, random_target
from specdec.models.target.target import Target


def target_without_data(shape=TINY):
    model = random_target(shape, max_positions=4096, device="meta", dtype=torch.bfloat16)
    return Target(model, backend="triton")


@pytest.fixture(scope="module")
def counted():
    return launches.count()


def test_the_committed_table_is_what_is_counted(counted):
    """If this fails, see whether the change was meant, and run `python -m specdec.bench.launches --update`."""
    assert launches.table_text(counted) == launches.table_text(launches.read_table())


def words(svg):
    """What stands in a picture, numbers at its axis aside."""
    return {text for text in re.findall(r"<text[^>]*>([^<]*)", svg) if not text.isdigit()}


def test_the_picture_and_the_page_show_the_committed_table(counted):
    name = LLAMA_2_7B.name
    root = launches._PICTURE.parents[2]
    texts = [
        words(svg) for svg in (launches.picture(name, counted[name]), launches._PICTURE.read_text(encoding="utf-8"))
    ]
    assert texts[0] == texts[1]  # lines and curves are matplotlib's, and change with its releases
    assert {f"{drafter} {row.num_launches}" for drafter, row in counted[name].items()} < texts[0]
    assert launches.markdown(counted[name]) in root.joinpath("docs", "performance.md").read_text(encoding="utf-8")


def test_json_has_launches_and_bytes_by_model_and_drafter(capsys):
    assert launches.main(["--json", "--models", "llama-2-7b", "--drafters", "none", "medusa"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["Llama-2-7B"]
    assert list(printed["Llama-2-7B"]) == ["none", "medusa"]
    assert all(set(row) == {"launches", "bytes"} for row in printed["Llama-2-7B"].values())


def test_weights_and_cache_are_the_floor(counted):
    """Plain decoding of Llama-2-7B reads all weights but the embedding, and 2048 tokens of keys and values."""
    model = LLAMA_2_7B
    matrices = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    weights = model.num_layers * matrices + model.vocab_size * model.hidden_size
    cache = 2 * model.num_layers * model.hidden_size * launches.CONTEXT
    assert counted[model.name]["none"].state_bytes == pytest.approx(2 * (weights + cache), rel=0.01)


def test_an_operator_more_is_counted_with_its_bytes(monkeypatch):
    target = target_without_data()
    before = count_step(target, None)
    score = target.score

    def slower(tokens, *args, **kwargs):
        torch.zeros(1000, device="meta", dtype=torch.float32)
        return score(tokens, *args, **kwargs)

    monkeypatch.setattr(target, "score", slower)
    after = count_step(target, None)
    assert after.num_launches("score") == before.num_launches("score") + 1
    assert after.num_bytes() == before.num_bytes() + 4000
    assert after.state_bytes == before.state_bytes


@pytest.mark.parametrize(("dtype", "expected"), [(torch.int16, 10), (torch.int64, 34)])
def test_a_selection_from_integers_is_as_many_launches_as_its_bytes_ask_for(dtype, expected, monkeypatch):
    target = target_without_data()
    score = target.score

    def selecting(*args, **kwargs):
        torch.empty(1, 32000, device="meta", dtype=dtype).topk(4)
        return score(*args, **kwargs)

    monkeypatch.setattr(target, "score", selecting)
    assert count_step(target, None).by_name()["topk"] == expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_counted_for_several_rows(name):
    target = target_without_data()
    one, four = (count_step(target, random_drafter(name, target), batch_size=rows) for rows in (1, 4))
    assert one.num_launches("draft") <= four.num_launches("draft") <= one.num_launches("draft") + 4
    assert one.num_bytes() < four.num_bytes()


def test_a_target_with_data_is_refused():
    model = random_target(TINY, max_positions=64, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"target: expected one on the meta device with the triton backend, got cpu"):
        count_step(Target(model), None)
