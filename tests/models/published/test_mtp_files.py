"""MTP heads, read from files of every layout, against transformers' and speculators' own networks on the same files."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib.drafter_checks import Nudged
from lib.mtp_files import NUM_LAYERS, behind_layers, config_of, new_target, randomized, save_target, separate_experts
from lib.references import reference
from specdec.drafters.load import load_drafter
from specdec.drafters.mtp import Mtp
from specdec.loop.decoder import Decoder
from specdec.models.networks.layer import MaskedAttention
from specdec.models.published.files import read_config, tensor_files
from specdec.models.published.mtp import read
from specdec.models.published.readers import recognise
from specdec.trees.shape import TreeShape

# fp32 sums of some hundred numbers, in another order
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def theirs():
    """transformers' classes, which not every version has."""
    layers = pytest.importorskip("transformers.modeling_layers")
    caches = pytest.importorskip("transformers.cache_utils")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("needs a transformers with MtpModel")
    return layers.MtpModel, caches.MtpCache


def save_with_head(family, num_layers, folder, theirs):
    """A target of the family with a head of so many layers in its files, loaded anew; and the head as theirs."""
    model = new_target(family, num_nextn_predict_layers=num_layers)
    head = randomized(theirs[0](model, num_layers))
    save_target(model, folder, behind_layers(head))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    # by itself it finds the layers of the published sizes alone
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[3-9].*"]
    return model, theirs[0].from_pretrained(model).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_states_at_all_positions_equal_transformers(family, tmp_path, theirs, generator):
    model, reference = save_with_head(family, 2, tmp_path, theirs)
    network = read(tensor_files(tmp_path), read_config(tmp_path)).eval()
    tokens = torch.randint(1, 6, (2, 20), generator=generator)
    states = ours = model.model(tokens).last_hidden_state
    cache = theirs[1](config=model.config.get_mtp_config())
    for layer in range(2):
        following = tokens[:, layer + 1 :]
        states, ours = states[:, : following.shape[1]], ours[:, : following.shape[1]]
        places = torch.arange(following.shape[1])[None]
        states = reference.forward_layer(layer, states, places + layer + 1, cache, input_ids=following)
        ours = network(ours, model.get_input_embeddings()(following), places, MaskedAttention(), layer)
        assert (ours - states).abs().max() < TOLERANCE * states.abs().max()


def logits_behind(reference, model, new_cache, text, drafted):
    """Their logits behind each token of `drafted`, the first of which is the root, after a committed text."""
    num_layers, text = len(reference.layers), text[None]
    states, tokens = model.model(text).last_hidden_state, torch.cat((text[:, 1:], drafted[None, :1]), 1)
    cache, found = new_cache(config=model.config.get_mtp_config()), []
    for step in range(len(drafted)):
        if step >= num_layers:  # one more key behind those of the last layer, from its own last state
            states, tokens = states[:, -1:], tokens[:, -1:]
        end = text.shape[1] + step
        places = torch.arange(end - tokens.shape[1] + 1, end + 1)[None]
        states = reference.forward_layer(min(step, num_layers - 1), states, places, cache, input_ids=tokens)
        found.append(model.lm_head(states[0, -1]))
        tokens = torch.cat((tokens[:, 1:], drafted[None, step + 1 : step + 2]), 1)
    return found


TREES = {"chain": TreeShape.chain(5), "tree": TreeShape.from_paths([[0], [2], [0, 1], [2, 0], [2, 3], [2, 3, 0]])}


@torch.no_grad()
@pytest.mark.parametrize("shape", TREES.values(), ids=TREES)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [2048, 2])
def test_drafts_of_every_step_equal_transformers(num_layers, chunk, shape, tmp_path, theirs, generator):
    """In a ragged batch, after steps that accepted none, some and all of a path; prompts in one piece and in more."""
    model, reference = save_with_head("glm4_moe", num_layers, tmp_path, theirs)
    drafter = load_drafter("mtp", model, tree=shape)
    assert type(drafter) is Mtp
    assert drafter.network.config.num_layers == num_layers
    prompts = [torch.randint(1, 6, (length,), generator=generator) for length in (7, 2, 4)]
    plain = Decoder(model).decode(prompts, 24).tokens
    nudged = Nudged(drafter, plain, prompts)
    result = Decoder(model, nudged).decode(prompts, 24, prefill_chunk_size=chunk)
    assert result.tokens == plain
    assert result.stats.tau > 1.5, "hardly anything was accepted"
    paths = {0: (0,)}
    for node in range(1, shape.num_nodes):
        paths[node] = (*paths[shape.parent[node]], node)
    fed = sorted(set(shape.parent) - {-1})
    for draft in (draft for drafts in nudged.drafts for draft in drafts):
        tokens = torch.tensor(draft.tokens)
        for node, logits in zip(fed, torch.cat(draft.logits), strict=True):
            expected = logits_behind(reference, model, theirs[1], draft.text, tokens[list(paths[node])])[-1]
            assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()


def new_speculators(family):
    """speculators' own MTP network of a family, with random weights."""
    core, config = reference("speculators.models.mtp.core"), reference("speculators.models.mtp.config")
    base, proposals = reference("speculators.config"), reference("speculators.proposals.greedy")
    proposal = proposals.GreedyTokenProposalConfig(speculative_tokens=3)
    network = core.MTPDraftModel(
        config.MTPSpeculatorConfig(
            transformer_layer_config=config_of(family),
            speculators_config=base.SpeculatorsConfig(
                algorithm="mtp",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=base.VerifierConfig(name_or_path="", architectures=[]),
            ),
        )
    )
    network = randomized(network)
    del network.verifier_lm_head  # as their training does once it has loaded the target's weights
    with torch.no_grad():
        for name, module in (("embedding", network.embed_tokens), ("head", network.lm_head)):
            generator = torch.Generator().manual_seed(len(name))
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    return network


def assert_equals_speculators(ours, theirs, generator):
    """Compare the states of three steps, each fed with those of the step before, at all positions."""
    hidden, tokens = torch.randn(1, 24, 32, generator=generator), torch.randint(1, 6, (1, 24), generator=generator)
    logits, _, _ = theirs(tokens, hidden)
    num_places = logits[0].shape[1]
    states, places = hidden[:, :num_places], torch.arange(num_places)[None]
    for step, expected in enumerate(logits):
        embedded = theirs.embed_tokens(tokens[:, step + 1 : step + 1 + num_places])
        states = ours(states, embedded, places, MaskedAttention())
        assert (theirs.lm_head(states) - expected).abs().max() < TOLERANCE * expected.abs().max()


SPECULATORS = ["qwen3", "qwen3_next", "qwen3_5_text"]


@torch.no_grad()
@pytest.mark.parametrize("family", SPECULATORS)
def test_files_of_speculators_equal_speculators(family, tmp_path, generator):
    network = new_speculators(family)
    network.save_pretrained(tmp_path)
    tensors, config = tensor_files(tmp_path), read_config(tmp_path)
    assert recognise(set(tensors), config) == "mtp"
    assert_equals_speculators(read(tensors, config).eval(), network, generator)


@torch.no_grad()
@pytest.mark.parametrize("family", SPECULATORS)
def test_heads_in_the_shards_of_qwen_equal_speculators(family, tmp_path, generator):
    """Their converter and our reader, on the same folder."""
    names = {
        "mtp_layers.0.input_proj": "mtp.fc",
        "mtp_layers.0.final_layernorm": "mtp.norm",
        "mtp_layers.0.hidden_layernorm": "mtp.pre_fc_norm_hidden",
        "mtp_layers.0.token_layernorm": "mtp.pre_fc_norm_embedding",
    }
    network = new_speculators(family)
    head = {}
    for name, tensor in network.state_dict().items():
        if name.startswith("mtp_layers."):
            module, _, end = name.rpartition(".")
            new = f"{names[module]}.{end}" if module in names else name.replace("mtp_layers.", "mtp.layers.")
            head[new] = tensor
    save_target(new_target(family), tmp_path, separate_experts(head), config={"mtp_num_hidden_layers": 1})
    converter = reference("speculators.convert.mtp.converter").MTPConverter()
    missing = network.load_state_dict(converter.convert_to_state_dict(tmp_path), strict=False).missing_keys
    assert not [name for name in missing if name.startswith("mtp_layers.")]
    assert_equals_speculators(read(tensor_files(tmp_path), read_config(tmp_path)).eval(), network, generator)


@torch.no_grad()
def test_heads_of_mimo_read_states_in_front_of_embeddings(tmp_path, generator):
    """The head of a file of speculators, whose projection takes embeddings first, with its columns swapped."""
    network = new_speculators("qwen3")
    head = {f"model.{name}": tensor for name, tensor in network.state_dict().items() if name.startswith("mtp_layers.")}
    projection = "model.mtp_layers.0.input_proj.weight"
    head[projection] = torch.cat(head[projection].chunk(2, 1)[::-1], 1)
    save_target(new_target("qwen3"), tmp_path, head, config={"num_nextn_predict_layers": 1})
    config = read_config(tmp_path)
    assert recognise(set(tensor_files(tmp_path)), config) is None  # a target, unless somebody says which kind is meant
    for family in ("qwen3", "mimo"):  # which transformers does not know
        ours = read(tensor_files(tmp_path), {**config, "model_type": family, "rope_theta": 10000.0})
        assert ours.config.states_first
        assert ours.config.family is None
        assert_equals_speculators(ours.eval(), network, generator)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The folder of a Qwen3 target with one layer of a head in DeepSeek's layout, and copies of what it shares."""
    model, folder = new_target("qwen3"), tmp_path_factory.mktemp("dense")
    save_target(model, folder, dense_head(model), config={"num_nextn_predict_layers": 1})
    return model, folder


def dense_head(model):
    """A head of the shape of the target's own layers, under DeepSeek's names."""
    size, start = model.config.hidden_size, f"model.layers.{NUM_LAYERS}."
    layer = {start + name: tensor for name, tensor in model.model.layers[0].state_dict().items()}
    norms = {f"{start}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies = {
        "embed_tokens": model.get_input_embeddings().weight,
        "shared_head.head": model.get_output_embeddings().weight,
    }
    return {
        **layer,
        **norms,
        f"{start}eh_proj.weight": torch.eye(size).repeat(1, 2),
        **{f"{start}{name}.weight": weight for name, weight in copies.items()},
    }


def test_only_the_tensors_of_the_head_are_read(dense):
    _, folder = dense
    tensors = tensor_files(folder)
    read(tensors, read_config(folder))
    start = f"model.layers.{NUM_LAYERS}."
    assert tensors._read.keys() == {
        name for name in tensors if name.startswith(start) and not name.endswith(("embed_tokens.weight", "head.weight"))
    }


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_copies_that_are_none_are_named(name, dense, tmp_path):
    model, folder = dense
    load_drafter(folder, model, kind="mtp")
    wrong = f"model.layers.{NUM_LAYERS}.{name}.weight"
    head = dense_head(model)
    save_target(model, tmp_path, {**head, wrong: head[wrong] + 0.1}, config={"num_nextn_predict_layers": 1})
    with pytest.raises(ValueError, match=rf"{wrong}: expected a copy of the target's (embedding|LM head), got another"):
        load_drafter(tmp_path, model, kind="mtp")


@pytest.mark.parametrize(
    "lacking",
    ["enorm.weight", "eh_proj.weight", "shared_head.norm.weight", "self_attn.q_proj.weight", "mlp.up_proj.weight"],
)
def test_missing_tensors_are_named(lacking, dense):
    _, folder = dense
    tensors = {name: tensor for name, tensor in tensor_files(folder).items() if not name.endswith(f"3.{lacking}")}
    with pytest.raises(ValueError, match="missing tensors"):
        read(tensors, read_config(folder))


def test_layers_that_the_configuration_promises_are_missed_by_name(dense):
    _, folder = dense
    with pytest.raises(ValueError, match=r"missing tensors .*depths\.1\.block"):
        read(tensor_files(folder), {**read_config(folder), "num_nextn_predict_layers": 2})


def test_targets_without_a_head_and_of_no_origin_are_refused(dense, tmp_path):
    model, _ = dense
    with pytest.raises(ValueError, match=r"expected the folder or hub id of the target's files"):
        load_drafter("mtp", new_target("qwen3"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected the tensors of an MTP head \(model\.layers\..*got none of them"):
        load_drafter("mtp", AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("chain_hidden_post_norm", True),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
    ],
)
def test_fields_that_change_the_result_are_refused_by_name(field, value, dense):
    _, folder = dense
    with pytest.raises(NotImplementedError, match=field):
        read(tensor_files(folder), {**read_config(folder), field: value})


def test_the_flag_that_puts_states_first_counts(dense):
    _, folder = dense
    assert not read(tensor_files(folder), read_config(folder)).config.states_first
    assert read(tensor_files(folder), {**read_config(folder), "mtp_hidden_states_first": True}).config.states_first
