"""The authors' files, as they published them: recognised by their tensors, loaded as they are, and the hub."""

import json

import pytest
import torch
from safetensors.torch import save_file

import specdec
from lib.eagle_checks import random_network as random_eagle
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from lib.published_files import falcon_file, hydra_file, network_as_published, random_heads
from specdec.drafters.medusa import Medusa
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.published import medusa
from specdec.models.published.files import TensorFiles
from specdec.models.target.target import Target


@pytest.fixture(scope="module")
def target():
    return Target(build_model("llama"))


@pytest.fixture
def heads(generator):
    return random_heads(generator)


def same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_heads_compute_the_papers_equation(heads, generator):
    hidden = torch.randn(5, HIDDEN_SIZE, generator=generator)
    logits = heads(hidden)
    tensors = medusa.tensors_of(heads)
    for head in range(3):
        state = hidden
        for layer in range(2):
            weight, bias = tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]
            state = state + torch.nn.functional.silu(state @ weight.T + bias)
        torch.testing.assert_close(logits[:, head], state @ tensors[f"{head}.2.weight"].T, atol=1e-5, rtol=1e-5)
    assert torch.equal(heads(hidden, num_heads=2), logits[:, :2])
    with torch.no_grad():  # what drafting runs
        torch.testing.assert_close(heads(hidden), logits)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "old_pickle.pt"])
def test_the_authors_file_loads_whatever_its_config_says(heads, target, tmp_path, name):
    tensors = medusa.tensors_of(heads)
    if name.endswith(".pt"):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=name != "old_pickle.pt")
    else:
        save_file(tensors, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    for source in (tmp_path, tmp_path / name):
        drafter = specdec.load_drafter(source, target)
        assert drafter.network.config == heads.config
        assert same_state(drafter.network, heads)


def test_five_published_heads_get_the_authors_tree(target, tmp_path):
    heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=5))
    torch.save(medusa.tensors_of(heads), tmp_path / "medusa_lm_head.pt")
    assert specdec.load_drafter(tmp_path, target).shape == specdec.TreeShape.preset("medusa/mc_sim_7b_63")


def test_of_a_medusa_2_model_only_the_heads_are_read(heads, target, tmp_path, monkeypatch):
    target.model.save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = {f"medusa_head.{name}": tensor for name, tensor in medusa.tensors_of(heads).items()}
    save_file(tensors, tmp_path / "heads-shard.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "heads-shard.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read, get = [], TensorFiles.__getitem__
    monkeypatch.setattr(TensorFiles, "__getitem__", lambda self, name: read.append(name) or get(self, name))
    drafter = specdec.load_drafter(tmp_path, target, tree=3)
    assert same_state(drafter.network, heads)
    assert set(read) == set(tensors)
    assert len(set(index["weight_map"].values())) > 2

    (tmp_path / "heads-shard.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="missing heads-shard.safetensors"):
        specdec.load_drafter(tmp_path, target)


def test_heads_of_version_2_share_the_targets_lm_head(heads, target, tmp_path, generator):
    tensors = {name: tensor for name, tensor in medusa.tensors_of(heads).items() if "linear" in name}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="missing the LM heads"):
        specdec.load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({"version": "2"}))
    network = specdec.load_drafter(tmp_path, target).network
    assert network.config == MedusaConfig(HIDDEN_SIZE, None, num_heads=3, num_layers=2)
    hidden, lm_head = torch.randn(4, HIDDEN_SIZE, generator=generator), target.model.get_output_embeddings()
    with torch.no_grad():
        heads.lm_head.copy_(lm_head.weight.expand_as(heads.lm_head))
        torch.testing.assert_close(network(hidden, lm_head=lm_head), heads(hidden), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="lm_head: expected the target's"):
        network(hidden)
    model, ids = target.model, torch.tensor([[3, 5, 7]])
    plain = specdec.generate(model, None, ids, max_new_tokens=8)
    assert torch.equal(specdec.generate(model, tmp_path, ids, max_new_tokens=8), plain)


def test_other_authors_files_are_recognised(target, tmp_path):
    model = target.model
    eagle, eagle3 = random_eagle(model, 1), random_eagle(model, 3)
    llama_like = {**model.config.to_dict(), "num_hidden_layers": 1}
    files = {
        "hydra++": (hydra_file(network_as_published(4)), {"hydra_num_heads": 3}, {"tree": 3}),
        "eagle": ({**eagle.state_dict(), "embed_tokens.weight": torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)}, llama_like, {}),
        "eagle3": (eagle3.state_dict(), {**llama_like, "draft_vocab_size": 32}, {"tap_layers": (0, 1, 1), "tree": 3}),
        "falcon": (*falcon_file(model), {"tree": 3}),
    }
    for kind, (tensors, config, settings) in files.items():
        folder = tmp_path / kind
        folder.mkdir()
        torch.save(tensors, folder / ("hydra_lm_head.pt" if kind == "hydra++" else "pytorch_model.bin"))
        (folder / "config.json").write_text(json.dumps(config))
        drafter = specdec.load_drafter(folder, target, **settings)
        assert drafter.kind == kind
        assert {parameter.dtype for parameter in drafter.network.parameters()} == {torch.float32}
        drafter.save_pretrained(tmp_path / "ours")
        again = specdec.load_drafter(tmp_path / "ours", target)
        assert same_state(again.network, drafter.network)
        assert (again.kind, again.shape) == (kind, drafter.shape)
    assert specdec.load_drafter(tmp_path / "eagle", target).shape == specdec.TreeShape.preset("eagle/mc_sim_7b_63")
    specdec.load_drafter(tmp_path / "eagle3", target, tap_layers=(0, 1, 1)).save_pretrained(tmp_path / "ours")
    assert specdec.load_drafter(tmp_path / "ours", target).tap_layers == (0, 1, 1)


def test_a_pickle_that_runs_code_is_not_run(target, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    torch.save({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt: expected a readable checkpoint"):
        specdec.load_drafter(tmp_path, target)
    torch.save({"model": {"0.0.linear.weight": torch.zeros(1)}}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="something else than a dict of tensors"):
        specdec.load_drafter(tmp_path, target)


def test_files_that_nobody_knows(target, tmp_path):
    save_file({"mystery.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(
        ValueError, match=r"expected files of one of medusa, hydra, .* got tensors mystery.weight .* kind="
    ):
        specdec.load_drafter(tmp_path, target)
    with pytest.raises(ValueError, match="got \\['mystery.weight'\\]"):
        specdec.load_drafter(tmp_path, target, kind="medusa")
    save_file({"mystery.weight": torch.zeros(2, 2)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="expected one checkpoint in .*, got a.safetensors, b.safetensors"):
        specdec.load_drafter(tmp_path, target)


# The hub


def test_the_hub_is_asked_for_pickles_only_where_there_is_nothing_else(heads, target, tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        if "*.pt" in allow_patterns:
            torch.save(medusa.tensors_of(heads), tmp_path / "medusa_lm_head.pt")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert isinstance(specdec.load_drafter("owner/medusa", target), Medusa)
    always = ["*.json", "mask_embedding.pt", "*.safetensors"]
    assert asked == [always, [*always, "*.bin", "*.pt", "*.pth"]]


def test_without_the_hub_the_error_says_so(target, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="'owner/nothing' is no folder here and not in the hub's cache"):
        specdec.load_drafter("owner/nothing", target)
