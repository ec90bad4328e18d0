"""The chat model's drafters in miniature: the table is sound, each part is trained once, and what is there stays."""

import dataclasses
import gzip
import io
import json
import shutil

import pytest
import torch
from rich.console import Console

import specdec
from lib.families import build_model
from lib.objectives import samples
from specdec.commands import train_smollm2 as command
from specdec.commands.cli import main
from specdec.models.target.target import Target
from specdec.training import bundled_drafters, smollm2
from specdec.training.bundled_drafters import BundledDrafter, drafters_table
from specdec.training.data import Sample, read_samples
from specdec.training.grown_tree import grown_tree
from specdec.training.kinds import TRAINABLE_KINDS, objective_class, setting_names, training_settings
from specdec.training.runs.probe import TauProbe
from specdec.training.smollm2 import train_smollm2
from specdec.training.smollm2_drafters import SMOLLM2_DRAFTERS
from specdec.training.states import StateStore
from specdec.tuning.growth import grow
from specdec.tuning.ranks import rank_texts

pytest.importorskip("accelerate")

SHAPE = ((0,), (1,), (0, 0))
DRAFTERS = {
    "heads": BundledDrafter("medusa", 3, 2e-3, SHAPE, {"num_heads": 2, "vocab_size": None}, 4, labels="text"),
    "head": BundledDrafter("eagle", 3, 2e-3, SHAPE, {}, 4),
    "parallel": BundledDrafter("parallelspec", 3, 1e-9, None, {"num_masks": 1}, 4, eagle="head"),
}
PROBE = TauProbe(num_prompts=2, new_tokens=4)


def write_texts(file, count=20):
    lines = [{"tokens": sample.tokens.tolist(), "prompt_length": 4} for sample in samples(count=count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def train_miniature(folder, **kwargs):
    arguments = {"max_length": 20, "held_out": 0.2, "drafters": DRAFTERS, "probe": PROBE, **kwargs}
    return train_smollm2(build_model("llama"), None, folder / "out", folder / "work", **arguments)


def test_the_table_has_every_kind_on_equal_budgets():
    target = Target(build_model("llama"))
    assert {recipe.kind for recipe in SMOLLM2_DRAFTERS.values()} == set(TRAINABLE_KINDS)
    assert len({recipe.steps * recipe.batch_size for recipe in SMOLLM2_DRAFTERS.values()}) == 1
    names = list(SMOLLM2_DRAFTERS)
    for name, recipe in SMOLLM2_DRAFTERS.items():
        assert recipe.eagle is None or names.index(recipe.eagle) < names.index(name)
        settings = {**training_settings(recipe.kind), **recipe.settings}
        if "draft_vocab_size" in settings:
            settings["draft_tokens"] = range(settings.pop("draft_vocab_size") // 256)
        if recipe.kind in ("eagle3", "peagle", "dflash", "dspark"):
            settings["tap_layers"] = (0, 1, 2)
        if "start_layers" in settings:
            settings["start_layers"] = (1, 2)
        if "head_rank" in settings:
            settings["head_rank"] = 8
        objective = objective_class(recipe.kind).new(target, **settings)
        shape = None if recipe.paths is None else specdec.TreeShape.from_paths(recipe.paths)
        assert objective.drafter(shape).shape.num_nodes <= 32, name


def test_the_likely_tree_is_that_of_a_search_through_all_nodes():
    paths = next(iter(SMOLLM2_DRAFTERS.values())).paths
    everything = [(a, *rest) for a in range(20) for rest in [(), *((b,) for b in range(9)), (0, 0), (0, 1), (1, 0)]]

    def chance(path):
        return torch.tensor([0.6 / (rank + 1) for rank in path], dtype=torch.float64).prod().item()

    least = min(chance(path) for path in paths)
    assert len(set(paths)) == 31
    assert all(path in paths for path in everything if chance(path) > least * 1.0001)


def test_parts_are_trained_once_and_share_what_the_target_says(tmp_path, monkeypatch):
    data = write_texts(tmp_path / "texts.jsonl")
    with pytest.raises(ValueError, match="only: expected some of heads, head, parallel, got eagle"):
        train_miniature(tmp_path, data=data, only=["eagle"])
    with pytest.raises(FileNotFoundError, match="expected head in .*, with which parallel begins, got none"):
        train_miniature(tmp_path, data=data, only=["parallel"])
    assert set(train_miniature(tmp_path, data=data, only=["heads"])) == {"heads"}
    before = (tmp_path / "out/heads/model.safetensors").read_bytes()
    monkeypatch.setattr(StateStore, "_append", lambda *_: pytest.fail("the target has read all texts"))
    reports = train_miniature(tmp_path, data=data)
    assert set(reports) == {"head", "parallel"}
    assert (tmp_path / "out/heads/model.safetensors").read_bytes() == before
    assert json.loads((tmp_path / "out/parallel/training.json").read_text())["settings"]["eagle"] == "head"
    assert train_miniature(tmp_path, data=data) == {}

    model = build_model("llama")
    prompt = torch.arange(1, 9)[None]
    plain = specdec.generate(model, None, prompt, max_new_tokens=8)
    for name, recipe in DRAFTERS.items():
        drafter = specdec.load_drafter(tmp_path / "out" / name, model)
        assert drafter.kind == recipe.kind
        assert torch.equal(specdec.generate(model, drafter, prompt, max_new_tokens=8), plain)
        assert json.loads((tmp_path / "out" / name / "training.json").read_text())["labels"] == recipe.labels

    out = io.StringIO()
    Console(file=out, width=160).print(drafters_table(tmp_path / "out", [*DRAFTERS, "other"], "all"))
    rows = {line.split()[0]: line.split()[1:] for line in out.getvalue().splitlines() if line.strip()}
    assert rows["other"] == ["-"] * 6
    assert rows["heads"][2:4] == ["12", f"{train_report(tmp_path / 'out/heads')['held_out_loss']:.3f}"]
    assert rows["heads"][4] == f"{train_report(tmp_path / 'out/heads')['tau']:.2f}"


def test_a_drafter_appears_with_its_tree_or_not_at_all(tmp_path, monkeypatch):
    data, grown = write_texts(tmp_path / "texts.jsonl"), specdec.TreeShape.from_paths([(0,), (3,)])
    drafters = {"head": dataclasses.replace(DRAFTERS["head"], grown=(3, 1))}

    monkeypatch.setattr(bundled_drafters, "grown_tree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_miniature(tmp_path, data=data, drafters=drafters)
    assert not (tmp_path / "out/head").exists()
    monkeypatch.setattr(bundled_drafters, "grown_tree", lambda *args, **kwargs: grown)
    monkeypatch.setattr(bundled_drafters, "train_drafter", lambda *args, **kwargs: pytest.fail("it is trained"))
    reports = train_miniature(tmp_path, data=data, drafters=drafters)
    assert reports["head"] == train_report(tmp_path / "out/head")
    assert specdec.load_drafter(tmp_path / "out/head", build_model("llama")).shape == grown
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["states"]


def test_a_folder_that_is_called_like_a_variant_says_nothing(tmp_path, monkeypatch):
    (tmp_path / "medusa").mkdir()
    monkeypatch.chdir(tmp_path)
    recipe = BundledDrafter("parallelspec", 1, 1e-3, None, {"num_masks": 1, "variant": "medusa"}, 4)
    train_miniature(tmp_path, data=write_texts(tmp_path / "texts.jsonl"), drafters={"masks": recipe})
    record = json.loads((tmp_path / "out/masks/training.json").read_text())
    assert "begins_with" not in record
    assert record["settings"]["variant"] == "medusa"


def test_another_drafter_to_begin_with_is_another_run(tmp_path, monkeypatch):
    data = write_texts(tmp_path / "texts.jsonl")
    train_miniature(tmp_path, data=data, only=["head"])
    monkeypatch.setattr("specdec.training.train._save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_miniature(tmp_path, data=data, only=["parallel"])
    shutil.rmtree(tmp_path / "out/head")
    monkeypatch.undo()
    train_miniature(tmp_path, data=data, only=["head"], seed=1)
    with pytest.raises(ValueError, match="begins_with"):
        train_miniature(tmp_path, data=data, only=["parallel"])


def test_a_tree_grows_on_the_held_out_answers_that_are_greedy(tmp_path, generator):
    """As `specdec tune --grow` does with the same prompts, where the target decodes."""
    model = build_model("llama")
    target = Target(model)
    prompts = [torch.randint(3, 96, (int(length),), generator=generator) for length in torch.randint(2, 7, (12,))]
    answers = [specdec.generate(model, None, prompt[None], max_new_tokens=16)[0, len(prompt) :] for prompt in prompts]
    lines = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) == 16]
    for row in (1, 3):  # sampled ones
        lines[row][1][5] += 1
    texts = [Sample(torch.cat(line), torch.arange(len(line[0]) + 16) >= len(line[0])) for line in lines]
    store = StateStore(tmp_path / "states", target, (0, 1, 2))
    store.read(texts)
    objective = objective_class("eagle3").new(target, version=3, tap_layers=(0, 1, 2))
    drafter = objective.drafter(specdec.TreeShape.from_paths(SHAPE))
    drafter.bind(target)
    shape = grown_tree(target, drafter, store, texts, num_nodes=9, depth=3, num_tokens=12, batch_size=4)

    greedy = [line for row, line in enumerate(lines) if row not in (1, 3)]
    ranks = rank_texts(target, drafter, [a for a, _ in greedy], [b[:12].tolist() for _, b in greedy], 3)
    expected = grow(ranks, 9)
    assert shape == expected.tree(len(expected.tau))
    with pytest.raises(ValueError, match="samples: expected greedy answers of 17 tokens, got none in "):
        grown_tree(target, drafter, store, texts, num_nodes=9, depth=3, num_tokens=17)


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def train_report(folder):
    return json.loads((folder / "training.json").read_text())["report"]


def test_without_data_the_texts_that_ship_are_read(tmp_path, monkeypatch):
    packed = tmp_path / "texts.jsonl.gz"
    packed.write_bytes(gzip.compress(write_texts(tmp_path / "texts.jsonl").read_bytes()))
    monkeypatch.setattr(smollm2, "SMOLLM2_TEXTS", packed)
    train_miniature(tmp_path, only=["heads"])
    train_miniature(tmp_path / "given", data=tmp_path / "texts.jsonl", only=["heads"])
    file = "out/heads/model.safetensors"
    assert (tmp_path / file).read_bytes() == (tmp_path / "given" / file).read_bytes()


def test_the_texts_that_ship_are_a_million_learnt_tokens_of_the_chat_model():
    samples = read_samples(smollm2.SMOLLM2_TEXTS, None, max_length=320, vocab_size=49152)
    assert sum(int(sample.loss_mask.sum()) for sample in samples) > 1_000_000
    assert len({tuple(sample.tokens.tolist()) for sample in samples}) == len(samples)


def test_the_command_trains_what_is_missing_and_shows_all(tmp_path, monkeypatch, capsys):
    fetched = []

    def load(name, options):
        fetched.append(name)
        return build_model("llama"), None

    monkeypatch.setattr(command, "load_target", load)
    monkeypatch.setattr("specdec.training.smollm2_drafters.SMOLLM2_DRAFTERS", DRAFTERS)
    arguments = ["train-smollm2", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--only", "hydra"]) == 2
    assert "only: expected some of heads, head, parallel, got hydra" in capsys.readouterr().err
    assert main([*arguments, "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert fetched == ["smollm2"]
    for name in DRAFTERS:
        (tmp_path / "out" / name).mkdir(parents=True)
    assert main(arguments) == 0
    assert fetched == ["smollm2"], "nothing to train, nothing to fetch"
    shown = capsys.readouterr().out
    assert all(name in shown for name in DRAFTERS)


def test_the_settings_that_errors_list_are_those_that_kinds_take():
    for recipe in SMOLLM2_DRAFTERS.values():
        if recipe.kind != "draft_model":  # its sizes are those of LlamaConfig
            assert set(recipe.settings) <= set(setting_names(recipe.kind)), recipe.kind
    assert "tap_layers" in setting_names("eagle3")
    assert "tap_layers" not in setting_names("eagle")
    assert "version" not in setting_names("eagle3"), "it is what makes the kind"
