"""Drafters from folders, files and names: what loads loads exactly, what does not is named."""

import json

import pytest
import torch
from families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from safetensors.torch import load_file, save_file

import specdec
from specdec.checkpoints import save_medusa
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.medusa import Medusa
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookup
from specdec.files import replace_file, replace_folder
from specdec.models.medusa import MedusaConfig, MedusaHeads
from specdec.models.target import Target

TREE = specdec.TreeShape.from_k_config((3, 2))


@pytest.fixture(scope="module")
def target():
    return Target(build_model("llama"))


@pytest.fixture
def heads(generator):
    heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3, num_layers=2))
    for parameter in heads.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return heads


def test_heads_compute_the_papers_equation(heads, generator):
    hidden = torch.randn(5, HIDDEN_SIZE, generator=generator)
    logits = heads(hidden)
    tensors = heads.to_published()
    for head in range(3):
        state = hidden
        for layer in range(2):
            weight, bias = tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]
            state = state + torch.nn.functional.silu(state @ weight.T + bias)
        torch.testing.assert_close(logits[:, head], state @ tensors[f"{head}.2.weight"].T, atol=1e-5, rtol=1e-5)
    assert torch.equal(heads(hidden, num_heads=2), logits[:, :2])


def test_a_saved_folder_loads_with_its_tree(heads, target, tmp_path):
    save_medusa(heads, tmp_path / "heads", tree=TREE)
    drafter = specdec.load_drafter(tmp_path / "heads", target)
    assert isinstance(drafter, Medusa)
    assert drafter.shape == TREE
    for name, tensor in drafter.heads.state_dict().items():
        assert torch.equal(tensor, heads.state_dict()[name]), name
    assert specdec.load_drafter(tmp_path / "heads", target, tree=2).shape == specdec.TreeShape.chain(2)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_the_authors_file_loads_whatever_its_config_says(heads, target, tmp_path, name):
    tensors = heads.to_published()
    if name.endswith(".pt"):
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    drafter = specdec.load_drafter(tmp_path, target)
    assert drafter.heads.config == heads.config


def test_five_published_heads_get_the_authors_tree(target, tmp_path):
    save_medusa(MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=5)), tmp_path / "heads")
    assert specdec.load_drafter(tmp_path / "heads", target).shape == specdec.TreeShape.preset("medusa/mc_sim_7b_63")


def test_missing_unexpected_and_misshapen_tensors_are_named(heads, target, tmp_path):
    save_medusa(heads, tmp_path / "heads")
    file = tmp_path / "heads" / "model.safetensors"
    good = load_file(file)

    def load(changes):
        tensors = {name: tensor for name, tensor in {**good, **changes}.items() if tensor is not None}
        save_file(tensors, file)
        return specdec.load_drafter(tmp_path / "heads", target)

    with pytest.raises(ValueError, match=r"missing tensors \['1.0.linear.bias'\]"):
        load({"1.0.linear.bias": None})
    with pytest.raises(ValueError, match=r"unexpected tensors \['0.7.linear.bias'\]"):
        load({"0.7.linear.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="got \\['lm_head.weight'\\]"):
        load({"lm_head.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"2.1.linear.weight: expected shape \[64, 64\], got \[64, 63\]"):
        load({"2.1.linear.weight": torch.zeros(64, 63)})
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="expected a readable checkpoint"):
        specdec.load_drafter(tmp_path / "heads", target)


def test_a_pickle_that_runs_code_is_not_run(target, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    torch.save({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt: expected a readable checkpoint"):
        specdec.load_drafter(tmp_path, target)


def test_a_model_folder_is_a_draft_model(target, tmp_path):
    build_model("llama", seed=1).save_pretrained(tmp_path)
    drafter = specdec.load_drafter(tmp_path, target, tree=(2, 1))
    assert isinstance(drafter, DraftModel)
    assert drafter.shape == specdec.TreeShape.from_k_config((2, 1))


def test_names_and_nothing(target):
    assert isinstance(specdec.load_drafter(None, target), NoDrafter)
    assert isinstance(specdec.load_drafter("none", target), NoDrafter)
    lookup = specdec.load_drafter("prompt_lookup", target, max_ngram=2, num_draft_tokens=4)
    assert isinstance(lookup, PromptLookup)
    assert (lookup.max_ngram, lookup.shape.max_depth) == (2, 4)
    assert specdec.load_drafter("prompt_lookup", target, tree=6).shape.max_depth == 6
    with pytest.raises(TypeError, match="prompt_lookup does not take these settings.*ngram"):
        specdec.load_drafter("prompt_lookup", target, ngram=2)


def test_malformed_folders(target, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected specdec.json, .* or config.json in .*, got none"):
        specdec.load_drafter(tmp_path, target)
    (tmp_path / "specdec.json").write_text("{")
    with pytest.raises(ValueError, match=r"specdec.json: expected a JSON object with the key 'kind'"):
        specdec.load_drafter(tmp_path, target)
    (tmp_path / "specdec.json").write_text('{"kind": "hydro"}')
    with pytest.raises(ValueError, match="kind: expected one of none, prompt_lookup, medusa, draft_model, got 'hydro'"):
        specdec.load_drafter(tmp_path, target)
    (tmp_path / "specdec.json").write_text('{"kind": "medusa"}')
    with pytest.raises(FileNotFoundError, match="expected model.safetensors"):
        specdec.load_drafter(tmp_path, target)


def test_an_interrupted_save_leaves_the_good_folder(tmp_path):
    with replace_folder(tmp_path / "good") as folder:
        (folder / "file").write_text("first")

    def interrupted():
        with replace_folder(tmp_path / "good") as folder:
            (folder / "file").write_text("half of the sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "good" / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    with replace_folder(tmp_path / "good") as folder:
        (folder / "other").write_text("second")
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["other"]
    replace_file(tmp_path / "note", "one")
    replace_file(tmp_path / "note", "two")
    assert (tmp_path / "note").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "note"]
