"""specdec.generate against transformers' generate: the same tokens for every drafter, family and batch."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import specdec
from lib.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, build_model, pad, random_prompts
from lib.fuzz_flaws import FailingStreamer
from lib.host_code import noisy_copy
from specdec.common import defaults
from specdec.drafters.medusa import Medusa
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.generation.generate import KEPT
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads

NEW_TOKENS = 64
DRAFTERS = ["none", "prompt_lookup", "medusa", "draft_chain", "draft_tree"]


def make_drafter(kind, model):
    """A drafter of small accuracy: random heads and models, so that every step accepts something else."""
    if kind == "prompt_lookup":
        return PromptLookup(max_ngram=1, num_draft_tokens=6)
    if kind == "medusa":
        heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3))
        heads.start_from(model.get_output_embeddings().weight)
        return Medusa(heads, specdec.TreeShape.from_k_config((6, 3, 2)))
    if kind.startswith("draft"):
        shape = specdec.TreeShape.chain(4) if kind == "draft_chain" else specdec.TreeShape.from_k_config((4, 2, 2))
        return specdec.load_drafter(noisy_copy(model), model, tree=shape)
    return None


def transformers_greedy(model, ids, mask, **kwargs):
    return model.generate(ids, attention_mask=mask, do_sample=False, **{"max_new_tokens": NEW_TOKENS, **kwargs})


def assert_same(model, drafter, ids, mask, *, tree=None, **settings):
    """Compare with transformers' greedy text; our output."""
    settings = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, **settings}
    output = specdec.generate(model, drafter, ids, tree=tree, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, model.generate(ids, do_sample=False, **settings))
    return output


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_transformers_token_for_token(family, drafter, batch, generator):
    model = build_model(family)
    prompts = random_prompts(generator, [17, 5, 11][:batch])
    output = assert_same(model, make_drafter(drafter, model), *pad(prompts, "left"))
    assert output.lossless
    if drafter not in ("none", "prompt_lookup"):  # a random model seldom repeats itself
        assert output.stats.tau > 1, "nothing was ever accepted: the test did not see an accepted path"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side, generator):
    model = build_model("qwen3")
    prompts = random_prompts(generator, [4, 15, 9])
    ids, mask = pad(prompts, side)
    sequences = specdec.generate(model, "prompt_lookup", ids, attention_mask=mask, max_new_tokens=20)
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    for row, prompt in enumerate(prompts):
        alone = specdec.generate(model, None, prompt[None], max_new_tokens=20)
        assert torch.equal(sequences[row, ids.shape[1] :], alone[0, len(prompt) :])


def test_pad_tokens_without_a_mask_are_padding_as_in_transformers(generator, model):
    ids, _ = pad(random_prompts(generator, [4, 9]), "left")
    expected = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=7, pad_token_id=0)
    got = specdec.generate(model, None, ids, max_new_tokens=12, eos_token_id=7, pad_token_id=0)
    assert torch.equal(got, expected)


def test_ends_at_any_of_several_stop_tokens_and_pads_after(generator, model):
    ids, mask = pad(random_prompts(generator, [6, 9, 7]), "left")
    free = transformers_greedy(model, ids, mask)[:, ids.shape[1] :]
    stops = [int(free[0, 3]), int(free[1, 10])]
    assert_same(model, "prompt_lookup", ids, mask, eos_token_id=stops, pad_token_id=0)


def test_eight_rows_and_a_long_prompt(generator, model):
    prompts = random_prompts(generator, [180, 3, 90, 41, 1, 7, 150, 12])
    assert_same(model, noisy_copy(model), *pad(prompts, "left"), max_new_tokens=24, tree=(3, 2))


@pytest.mark.parametrize("tree", ["medusa/mc_sim_7b_63", "eagle/mc_sim_7b_63", (6, 3, 3), 40])
def test_draft_model_with_trees_of_several_mask_words(tree, generator, model):
    prompts = random_prompts(generator, [9, 4])
    output = assert_same(model, noisy_copy(model), *pad(prompts, "left"), max_new_tokens=24, tree=tree)
    assert output.stats.tau > 1.5


def test_the_whole_context_can_be_used():
    for family in ("llama", "opt"):  # OPT's position table ends where the context does
        model = build_model(family)
        ids = torch.randint(1, VOCAB_SIZE, (1, 200), generator=torch.Generator().manual_seed(3))
        assert_same(model, noisy_copy(model), ids, torch.ones_like(ids), max_new_tokens=56, tree=(2, 2, 2, 2))


def test_settings_follow_the_order_of_transformers(generator, model):
    (prompt,) = random_prompts(generator, [6])
    ids = prompt[None]
    assert specdec.generate(model, None, ids).shape[1] == 6 + 20  # transformers' default
    model.generation_config.max_length = 9
    assert specdec.generate(model, None, ids).shape[1] == 9
    config = GenerationConfig(max_new_tokens=5, eos_token_id=None, pad_token_id=0)
    assert specdec.generate(model, None, ids, generation_config=config).shape[1] == 6 + 5
    assert specdec.generate(model, None, ids, generation_config=config, max_new_tokens=2).shape[1] == 6 + 2
    assert config.max_new_tokens == 5, "the caller's object must not change"


def test_model_configured_for_sampling_is_not_decoded_greedily_in_silence(generator, model):
    model.generation_config.do_sample = True
    (prompt,) = random_prompts(generator, [6])
    torch.manual_seed(1)
    first = specdec.generate(model, None, prompt[None], max_new_tokens=24)
    torch.manual_seed(2)
    assert not torch.equal(specdec.generate(model, None, prompt[None], max_new_tokens=24), first)
    greedy = specdec.generate(model, None, prompt[None], max_new_tokens=24, do_sample=False, temperature=0.6)
    assert torch.equal(greedy, transformers_greedy(model, prompt[None], None, max_new_tokens=24))


def test_a_drafter_of_which_nothing_is_accepted_is_reported(caplog, model):
    own, foreign = build_model("llama"), build_model("llama", seed=8)
    for drafter, reports in ((own, 0), (foreign, 1)):
        caplog.clear()
        settings = {"tree": 1, "max_new_tokens": 80 if drafter is foreign else 160}
        specdec.generate(model, drafter, torch.arange(6)[None], eos_token_id=[], **settings)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * reports
    assert "drafter: draft_model proposed in" in caplog.text


def test_a_drafter_that_serves_several_calls_follows_the_model(ids):
    model = build_model("llama")
    drafter = specdec.load_drafter(noisy_copy(model), model)

    def text(drafter):
        return specdec.generate(model, drafter, ids, max_new_tokens=12)

    first = text(None)
    assert all(torch.equal(text(drafter), first) for _ in range(3))
    decoder = KEPT[drafter]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    assert torch.equal(text(drafter), text(None))
    assert not torch.equal(text(drafter), first)
    assert KEPT[drafter] is decoder


def test_interrupt_in_the_middle_restores_the_model(model, ids):
    expected = transformers_greedy(model, ids, torch.ones_like(ids))
    before = model.config._attn_implementation
    streamer = FailingStreamer(4, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        specdec.generate(model, noisy_copy(model), ids, streamer=streamer, max_new_tokens=20)
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(transformers_greedy(model, ids, torch.ones_like(ids)), expected)


IDS = torch.tensor([[3, 4, 5]])


def wrong_vocabulary():
    config = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE + 1025, **config))


def medusa(tree, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE):
    return Medusa(MedusaHeads(MedusaConfig(hidden_size, vocab_size, num_heads=2)), specdec.as_tree_shape(tree))


# by error: (what its message says, arguments other than the model); four new tokens where the call does not say
BAD_CALLS = {
    TypeError: [
        (r"input_ids: expected a .* tensor of token ids, got NoneType", {"input_ids": None}),
        (r"seed: expected an int or one int per row", {"do_sample": True, "seed": ["a"]}),
        (r"acceptance: expected a name or an acceptance rule, got int", {"acceptance": 3}),
    ],
    ValueError: [
        (r"input_ids: expected at least one prompt", {"input_ids": IDS[:, :0]}),
        (r"input_ids: expected a \[batch, length\] .*, got \[3\]", {"input_ids": IDS[0]}),
        (r"input_ids: expected token ids from 0 to 95, got 100", {"input_ids": IDS + 95}),
        (r"attention_mask: expected shape \[1, 3\] as input_ids, got \[1, 4\]", {"attention_mask": torch.ones(1, 4)}),
        (
            r"attention_mask: .* got only padding in row 1",
            {"input_ids": IDS.repeat(2, 1), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
        ),
        (
            r"attention_mask: expected padding at the ends only, got a gap in row 0",
            {"attention_mask": torch.tensor([[1, 0, 1]])},
        ),
        (
            r"max_new_tokens: expected 1 to 253 after a prompt of 3 tokens .*context is 256.*, got 254",
            {"max_new_tokens": 254},
        ),
        (r"max_new_tokens: expected an int of at least 1, got 0", {"max_new_tokens": 0}),
        (r"max_length: expected more than the prompt's 3 tokens, got 3", {"max_new_tokens": None, "max_length": 3}),
        (r"max_new_token: expected an argument of specdec.generate", {"max_new_token": 3}),
        (r"save_pretrained: expected an argument", {"save_pretrained": 3}),
        (r"suppress_tokens: expected a list of token ids from 0 to 95, got 5", {"suppress_tokens": 5}),
        (r"begin_suppress_tokens: expected a list of token ids from 0 to 95, got 5", {"begin_suppress_tokens": 5}),
        (r"repetition_penalty: expected a number over 0, got 0", {"repetition_penalty": 0}),
        (r"temperature: expected a number over 0", {"do_sample": True, "temperature": 0.0}),
        (r"top_p: expected a number over 0 and at most 1, got 1.5", {"do_sample": True, "top_p": 1.5}),
        (r"top_k: expected an int of at least 0, got -3", {"do_sample": True, "top_k": -3}),
        (r"min_p: expected a number from 0 to 1, got -0.1", {"do_sample": True, "min_p": -0.1}),
        (r"tokenizer: expected the model's tokenizer .* got None", {"stop_strings": ["a"]}),
        (r"max_time: expected a number of seconds over 0, got -3.0", {"max_time": -3.0}),
        (r"num_return_sequences: expected 1 without sampling", {"num_return_sequences": 2}),
        (r"seed: expected 0 or more, got -1", {"do_sample": True, "seed": -1}),
        (r"seed: expected one per row, 1, got 2", {"do_sample": True, "seed": [1, 2]}),
        (r"acceptance: expected auto, greedy, naive, .*got 'lucky'", {"acceptance": "lucky"}),
        (r"acceptance: rejection samples, which contradicts do_sample=False", {"acceptance": "rejection"}),
        (
            r"acceptance: greedy never samples, which contradicts do_sample=True",
            {"acceptance": "greedy", "do_sample": True},
        ),
        (
            r"acceptance: rejection needs a drafter that draws its candidates from a known law, got prompt_lookup",
            {"acceptance": "rejection", "do_sample": True, "drafter": "prompt_lookup"},
        ),
        (
            r"acceptance: traversal needs a chain, or candidates drawn for every parent anew, but medusa",
            {"acceptance": "traversal", "do_sample": True, "drafter": medusa((2, 2))},
        ),
        (
            r"tree: expected children that take the ranks 0, 1, ... for acceptance='rejection'",
            {"acceptance": "rejection", "do_sample": True, "drafter": medusa(specdec.TreeShape.from_paths([[0], [2]]))},
        ),
        (
            r"logits_processor: expected scores \[1, 96\] from function, got \[1, 3\]",
            {"logits_processor": [lambda ids, scores: scores[:, :3]]},
        ),
        (
            r"logits_processor: expected scores without NaN from function, got NaN",
            {"logits_processor": [lambda ids, scores: scores * float("nan")]},
        ),
        (
            r"logits_processor: expected a token that is still possible, got none from function",
            {"logits_processor": [lambda ids, scores: scores - float("inf")]},
        ),
        (r"streamer: expected one prompt.* got 2", {"input_ids": IDS.repeat(2, 1), "streamer": object()}),
        (
            r"drafter: expected the target's vocabulary of 96 tokens, or .* differently by up to 1024, got 1121",
            {"drafter": wrong_vocabulary()},
        ),
        (r"drafter: expected vocab_size 96 as the target's, got 50", {"drafter": medusa(2, vocab_size=50)}),
        (r"drafter: expected hidden_size 64 as the target's, got 32", {"drafter": medusa(2, hidden_size=32)}),
        (r"tree: expected ranks below 96, got 96", {"drafter": build_model("llama"), "tree": (97,)}),
        (r"tree: expected at least one draft token, got the root alone", {"drafter": build_model("llama"), "tree": 0}),
        (r"drafter: expected a folder with medusa weights", {"drafter": "medusa"}),
        (r"tree: expected None with a Drafter object", {"drafter": PromptLookup(), "tree": 3}),
        (r"tree: expected a chain", {"drafter": "prompt_lookup", "tree": (2, 2)}),
        (r"tree: expected None without a drafter", {"drafter": None, "tree": 2}),
        (r"medusa/mc_sim", {"drafter": build_model("llama"), "tree": "medusa/mc_sim"}),
    ],
    NotImplementedError: [
        (r"num_beams: expected its default, got 4", {"num_beams": 4}),
        (r"num_beams: expected its default, got 0", {"num_beams": 0}),
        (r"guidance_scale: expected its default, got 0", {"guidance_scale": 0}),
        (r"guidance_scale: .* got False", {"guidance_scale": False}),
        (r"synced_gpus: expected its default, got True", {"synced_gpus": True}),
        (r"dola_layers: expected its default, got 'low'", {"dola_layers": "low"}),
        (r"guidance_scale: expected its default, got 2.0", {"guidance_scale": 2.0}),
    ],
    FileNotFoundError: [
        (r"drafter: expected a kind .*, a folder or a hub id, got 'prompt-lookup'", {"drafter": "prompt-lookup"}),
    ],
}


@pytest.mark.parametrize(
    ("error", "message", "arguments"), [(error, *call) for error, calls in BAD_CALLS.items() for call in calls]
)
def test_bad_input_is_an_error_that_names_the_argument(error, message, arguments, model):
    attention = model.config._attn_implementation
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        specdec.generate(model, **{"drafter": None, "input_ids": IDS, "max_new_tokens": 4, **arguments})
    assert model.config._attn_implementation == attention
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_tree_that_does_not_fit_the_heads_is_refused():
    with pytest.raises(ValueError, match="tree: expected a depth of at most 2, one level per head, got 3"):
        medusa(3)
    with pytest.raises(ValueError, match="tree: expected ranks below 96, got 96"):
        medusa((97,))


def test_a_dtype_that_kernels_do_not_know_is_refused_by_drafters_with_a_network(ids):
    model = build_model("llama").double()
    specdec.generate(model, "prompt_lookup", ids, max_new_tokens=4)
    expected = "target: expected weights in one of float32, float16, bfloat16 for a medusa drafter, got float64"
    with pytest.raises(ValueError, match=expected):
        specdec.generate(model, make_drafter("medusa", model), ids, max_new_tokens=4)


def test_an_encoder_decoder_model_is_refused():
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="model: expected a decoder-only model"):
        specdec.generate(model, None, IDS)


def test_what_is_set_for_all_of_torch_stays_outside(model, ids, caplog):
    expected = specdec.generate(model, "prompt_lookup", ids, max_new_tokens=8)
    defaults._warn_of_autocast.cache_clear()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(specdec.generate(model, "prompt_lookup", ids, max_new_tokens=8), expected)
            assert torch.is_autocast_enabled("cpu")
    assert sum("leaves torch.autocast out" in record.message for record in caplog.records) == 1
    with torch.device("meta"):
        assert torch.equal(specdec.generate(model, "prompt_lookup", ids, max_new_tokens=8), expected)
        assert torch.empty(0).is_meta
