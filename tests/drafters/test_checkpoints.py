"""Drafters from folders, files and names: what loads loads exactly, what does not is named."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import specdec
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from lib.published_files import random_heads
from specdec.common.files import replace_file, replace_folder
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import NETWORK_KINDS, settings_of
from specdec.drafters.load import DRAFTER_KINDS
from specdec.drafters.medusa import Medusa
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafting.folder import TargetRecord
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.target.target import Target
from specdec.training.kinds import TRAINABLE_KINDS, objective_class, training_settings
from specdec.trees.dynamic import DynamicTree

TREE = specdec.TreeShape.from_k_config((3, 2))
_BLOCK = {"tap_layers": (0, 1), "num_layers": 2}
TAPS = {"eagle3": {"tap_layers": (0, 1, 2)}, "peagle": {"tap_layers": (0, 1, 2)}, "dflash": _BLOCK, "dspark": _BLOCK}


@pytest.fixture(scope="module")
def target():
    return Target(build_model("llama"))


@pytest.fixture
def heads(generator):
    return random_heads(generator)


@pytest.fixture
def saved(heads, target, tmp_path):
    """A folder of ours with Medusa heads."""
    save(heads, target, tmp_path / "heads")
    return tmp_path / "heads"


def save(heads, target, folder, tree=TREE):
    drafter = Medusa(heads, tree)
    drafter.bind(target)
    drafter.save_pretrained(folder)


def same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Our own folders


@pytest.mark.parametrize("kind", [kind for kind in NETWORK_KINDS if kind in TRAINABLE_KINDS])
def test_a_folder_of_every_kind_comes_back(kind, target, tmp_path):
    settings = {**training_settings(kind), **TAPS.get(kind, {})}
    objective = objective_class(kind).new(target, **settings)
    drafter = objective.drafter(specdec.TreeShape.from_k_config((3, 2, 1)))
    drafter.network.half()
    drafter.target_record = TargetRecord.of(target)
    drafter.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"specdec.json", "model.safetensors", "tree.json"}
    again = specdec.load_drafter(tmp_path / "saved", target)
    assert type(again) is type(drafter)
    assert (again.kind, again.shape) == (kind, drafter.shape)
    assert asdict(again.network.config) == asdict(drafter.network.config)
    floats = [tensor for tensor in again.network.state_dict().values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.float32}, "cast to the target's dtype"
    assert same_state(again.network, drafter.network.float())
    ids = torch.tensor([[3, 5, 7, 2]])
    plain = specdec.generate(target, None, ids, max_new_tokens=6)
    assert torch.equal(specdec.generate(target, again, ids, max_new_tokens=6), plain)


def test_missing_unexpected_and_misshapen_tensors_are_named(saved, target):
    file = saved / "model.safetensors"
    good = load_file(file)

    def load(changes):
        tensors = {name: tensor for name, tensor in {**good, **changes}.items() if tensor is not None}
        save_file(tensors, file)
        return specdec.load_drafter(saved, target)

    with pytest.raises(ValueError, match=r"missing tensors \['block_bias'\]"):
        load({"block_bias": None})
    with pytest.raises(ValueError, match=r"unexpected tensors \['extra'\]"):
        load({"extra": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"block_bias: expected shape \[3, 2, 64\], got \[3, 2, 63\]"):
        load({"block_bias": torch.zeros(3, 2, 63)})
    content = file.read_bytes()
    for broken in (b"not a checkpoint", content[: len(content) // 2], b""):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors: expected a readable checkpoint"):
            specdec.load_drafter(saved, target)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="expected model.safetensors"):
        specdec.load_drafter(saved, target)


def test_malformed_records_are_named(saved, target):
    file = saved / "specdec.json"
    good = json.loads(file.read_text())

    def load(**changes):
        record = {key: value for key, value in {**good, **changes}.items() if value is not None}
        file.write_text(json.dumps(record))
        return specdec.load_drafter(saved, target)

    with pytest.raises(ValueError, match=r"specdec.json: expected format 2, got 1"):
        load(format=1)
    with pytest.raises(ValueError, match="kind: expected one of medusa, hydra, .*, got 'hydro'"):
        load(kind="hydro")
    with pytest.raises(ValueError, match=r"specdec.json: expected 'config', and 'target'"):
        load(target=None)
    with pytest.raises(ValueError, match=r"missing fields \['vocab_size'\], unknown fields \['width'\]"):
        load(config={"hidden_size": 64, "width": 3})
    with pytest.raises(ValueError, match="num_heads: expected at least 1, got 0"):
        load(config={**good["config"], "num_heads": 0})
    file.write_text("{")
    with pytest.raises(ValueError, match=r"specdec.json: expected a JSON object with the keys 'kind' and 'format'"):
        specdec.load_drafter(saved, target)
    load()
    (saved / "tree.json").write_text("[")
    with pytest.raises(ValueError, match="tree.json"):
        specdec.load_drafter(saved, target)
    assert specdec.load_drafter(saved, target, tree=2).shape == specdec.TreeShape.chain(2)


def test_another_target_of_the_same_sizes_is_noticed(saved, target):
    other = build_model("llama", seed=1)
    with pytest.raises(ValueError, match=r"same sizes and another embedding; .*any_target=True"):
        specdec.load_drafter(saved, other)
    assert isinstance(specdec.load_drafter(saved, other, any_target=True), Medusa)
    record = json.loads((saved / "specdec.json").read_text())
    record["target"]["hidden_size"] = 65
    (saved / "specdec.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="expected hidden_size 64 as the target's, got 65"):
        specdec.load_drafter(saved, target, any_target=True)


def test_the_fingerprint_survives_casts_and_nothing_else():
    exact = TargetRecord.of(Target(build_model("llama")))
    casts = [(torch.float16,), (torch.bfloat16,), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]
    for dtypes in casts:
        model = build_model("llama")
        for dtype in dtypes:
            model = model.to(dtype)
        cast = TargetRecord.of(Target(model.float()))
        assert cast.fingerprint != exact.fingerprint
        cast.check(exact, source="x", any_target=False)
        exact.check(cast, source="x", any_target=False)
    model = build_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)  # a hundredth, as of a short fine-tuning
    with pytest.raises(ValueError, match="another embedding"):
        exact.check(TargetRecord.of(Target(model)), source="x", any_target=False)


def test_a_drafter_must_know_its_target_to_be_saved(heads, tmp_path):
    with pytest.raises(ValueError, match=r"call drafter.bind\(target\) first"):
        Medusa(heads, TREE).save_pretrained(tmp_path / "heads")
    assert not any(tmp_path.iterdir())


def test_dynamic_trees(target, tmp_path):
    drafter = objective_class("eagle").new(target).drafter(DynamicTree(8, 2, 3))
    drafter.bind(target)
    drafter.save_pretrained(tmp_path / "eagle")
    assert specdec.load_drafter(tmp_path / "eagle", target).shape == DynamicTree(8, 2, 3)
    loaded = specdec.load_drafter(tmp_path / "eagle", target, tree="dynamic", num_nodes=12, depth=3, top_k=4)
    assert loaded.shape == DynamicTree(12, 3, 4)
    assert specdec.load_drafter(tmp_path / "eagle", target, tree=(2, 1)).shape == specdec.TreeShape.from_k_config(
        (2, 1)
    )
    with pytest.raises(TypeError, match="top_k: eagle has no such setting; it has none"):
        specdec.load_drafter(tmp_path / "eagle", target, tree=(2, 1), top_k=4)


def test_a_dynamic_tree_is_refused_by_kinds_that_do_not_grow_one(saved, target):
    with pytest.raises(ValueError, match="tree: expected a static tree with medusa"):
        specdec.load_drafter(saved, target, tree="dynamic")
    with pytest.raises(ValueError, match="tree: expected a static tree with draft_model"):
        specdec.load_drafter(build_model("llama", seed=1), target, tree=DynamicTree())


# Draft models, names and bad arguments


def test_a_model_folder_is_a_draft_model(target, tmp_path):
    model = build_model("llama", seed=1)
    model.save_pretrained(tmp_path / "stock")
    drafter = specdec.load_drafter(tmp_path / "stock", target, tree=(2, 1))
    assert isinstance(drafter, DraftModel)
    assert drafter.shape == specdec.TreeShape.from_k_config((2, 1))
    drafter.save_pretrained(tmp_path / "ours")
    again = specdec.load_drafter(tmp_path / "ours", target)
    assert again.shape == drafter.shape
    assert same_state(again.model, model)


def test_a_draft_model_without_all_its_tensors_is_refused(target, tmp_path):
    build_model("llama", seed=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing tensors \['lm_head.weight'\] of LlamaForCausalLM"):
        specdec.load_drafter(tmp_path, target)
    save_file({**tensors, "lm_head.weight": head, "head.bias": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected tensors \['head.bias'\]"):
        specdec.load_drafter(tmp_path, target)


def test_names_and_nothing(target):
    assert isinstance(specdec.load_drafter(None, target), NoDrafter)
    assert isinstance(specdec.load_drafter("none", target), NoDrafter)
    lookup = specdec.load_drafter("prompt_lookup", target, max_ngram=2, num_draft_tokens=4)
    assert isinstance(lookup, PromptLookup)
    assert (lookup.max_ngram, lookup.shape.max_depth) == (2, 4)
    assert specdec.load_drafter("prompt_lookup", target, tree=6).shape.max_depth == 6
    assert specdec.load_drafter("lookahead", target, level=4, window=3, guesses=2).window == 3
    with pytest.raises(TypeError, match="ngram: prompt_lookup has no such setting; it has max_ngram, num_draft_tokens"):
        specdec.load_drafter("prompt_lookup", target, ngram=2)
    with pytest.raises(ValueError, match="tree: expected a chain"):
        specdec.load_drafter("prompt_lookup", target, tree=(2, 2))
    with pytest.raises(ValueError, match="tree: expected None with lookahead"):
        specdec.load_drafter("lookahead", target, tree=2)


def test_unknown_settings_and_kinds_are_named(saved, target):
    with pytest.raises(TypeError, match="recurrent: medusa has no such setting; it has none"):
        specdec.load_drafter(saved, target, recurrent=True)
    with pytest.raises(ValueError, match="kind: expected 'medusa', which is what .* holds, got 'hydra'"):
        specdec.load_drafter(saved, target, kind="hydra")
    with pytest.raises(ValueError, match=f"kind: expected one of {', '.join(DRAFTER_KINDS).replace('+', '.')}, got"):
        specdec.load_drafter(saved, target, kind="hydro")
    with pytest.raises(ValueError, match="expected a folder with eagle3 weights, got the kind's name alone"):
        specdec.load_drafter("eagle3", target)
    with pytest.raises(ValueError, match="expected a kind that can be trained .*draft_model, medusa, .* got 'none'"):
        objective_class("none")
    assert (settings_of("eagle"), settings_of("eagle3")) == ((), ("tap_layers",))


def test_folders_that_hold_nothing(target, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        specdec.load_drafter(tmp_path, target)
    with pytest.raises(
        FileNotFoundError, match=r"expected a kind \(none, prompt_lookup, lookahead, suffix\), a folder"
    ):
        specdec.load_drafter(tmp_path / "nowhere", target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: expected a JSON object, got list"):
        specdec.load_drafter(tmp_path, target)


# Saving


def test_a_full_disk_keeps_the_old_folder(saved, heads, target, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    heads.block_bias.data.add_(1.0)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for place in ("specdec.drafting.folder.save_file", "pathlib.Path.write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            with pytest.raises(OSError, match="No space left"):
                save(heads, target, saved)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert [path.name for path in saved.parent.iterdir()] == ["heads"]
    save(heads, target, saved)
    assert same_state(specdec.load_drafter(saved, target).network, heads)


def test_nothing_of_the_users_is_replaced(heads, target, tmp_path):
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    (folder / "notes.txt").write_text("precious")
    for name in ("notes.txt", "sub"):
        with pytest.raises(FileExistsError, match=rf"folder: expected a new or empty folder, .* which holds .*{name}"):
            save(heads, target, folder)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(FileExistsError, match="folder: expected a folder, got the file"):
        save(heads, target, file)
    assert (folder / "notes.txt").read_text() == file.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes"]
    (tmp_path / "empty").mkdir()
    save(heads, target, tmp_path / "empty")
    save(heads, target, tmp_path / "empty")


def test_an_interrupted_save_leaves_the_good_folder(tmp_path, monkeypatch):
    with replace_folder(tmp_path / "good") as folder:
        (folder / "tree.json").write_text("first")

    def interrupted():
        with replace_folder(tmp_path / "good") as folder:
            (folder / "tree.json").write_text("half of the sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "good" / "tree.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    rename, moves = Path.rename, []

    def failing(self, to):
        moves.append(to)
        if len(moves) == 2:  # the old folder has been moved away, the new one has not been moved in
            raise OSError("no more names")
        return rename(self, to)

    def replaced():
        with replace_folder(tmp_path / "good") as folder:
            (folder / "tree.json").write_text("second")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OSError, match="no more names"):
            replaced()
    assert (tmp_path / "good" / "tree.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    with replace_folder(tmp_path / "good") as folder:
        (folder / "config.json").write_text("second")
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["config.json"]
    replace_file(tmp_path / "note", "one")
    replace_file(tmp_path / "note", "two")
    assert (tmp_path / "note").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "note"]


def test_tensors_that_share_memory_are_saved_under_each_name(target, tmp_path):
    model = LlamaForCausalLM(target.model.config)
    heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=1))
    heads.register_buffer("alias", heads.block_bias.detach())
    drafter = Medusa(heads, specdec.TreeShape.chain(1))
    drafter.bind(Target(model))
    drafter.save_pretrained(tmp_path / "heads")
    assert "alias" in load_file(tmp_path / "heads" / "model.safetensors")
