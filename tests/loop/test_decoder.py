"""The decoding loop: exact counts with drafters that know the answer, exact cuts, and nothing left behind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.families import VOCAB_SIZE, build_model, random_prompts
from lib.scripted_drafters import always_wrong, oracle
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats
from specdec.loop.step import NonFiniteLogitsError
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(3),
    "k_config": TreeShape.from_k_config((3, 2, 1)),
    "medusa": TreeShape.preset("medusa/mc_sim_7b_63"),
    "eagle": TreeShape.preset("eagle/mc_sim_7b_63"),
}


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


@pytest.fixture(scope="module")
def plain(model):
    return Decoder(model)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_oracle_reaches_the_tree_depth_plus_one(model, plain, shape, generator):
    prompts = random_prompts(generator, [9, 4, 13])
    num_tokens = 1 + 4 * (shape.max_depth + 1)  # prefill's token and four full steps
    expected = plain.decode(prompts, num_tokens).tokens
    result = Decoder(model, oracle(shape, expected, VOCAB_SIZE)).decode(prompts, num_tokens)
    assert result.tokens == expected
    assert result.stats.num_emitted == [[shape.max_depth + 1] * 4] * 3
    assert result.stats.tau == shape.max_depth + 1
    assert result.stats.acceptance_at_depth == [1.0] * shape.max_depth
    assert result.stats.num_target_passes == 4
    assert result.stats.lossless


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_always_wrong_drafter_has_tau_one(model, plain, shape, generator):
    prompts = random_prompts(generator, [9, 4])
    expected = plain.decode(prompts, 7).tokens
    result = Decoder(model, always_wrong(shape, expected, VOCAB_SIZE)).decode(prompts, 7)
    assert result.tokens == expected
    assert result.stats.num_emitted == [[1] * 6] * 2
    assert result.stats.tau == 1
    assert result.stats.acceptance_at_depth == [0.0]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_stop_token_and_any_budget_cut_exactly_there(data):
    model = build_model("llama")
    prompt = torch.tensor([5, 17, 60, 2, 33])
    plain = Decoder(model)
    text = plain.decode([prompt], 24).tokens[0]
    budget = data.draw(st.integers(1, 24), label="budget")
    stop = text[data.draw(st.integers(0, 23), label="position of the stop token")]
    shape = data.draw(st.sampled_from(list(SHAPES.values())), label="shape")
    expected = text[:budget]
    if stop in expected:
        expected = expected[: expected.index(stop) + 1]
    result = Decoder(model, oracle(shape, [text], VOCAB_SIZE)).decode([prompt], budget, stop_tokens=[stop])
    assert result.tokens[0] == expected
    assert sum(result.stats.num_emitted[0]) == len(expected) - 1


def test_every_emitted_token_is_reported_once_and_in_order(model, generator):
    prompts = random_prompts(generator, [12])
    steps = []
    decoder = Decoder(model, PromptLookup(num_draft_tokens=4))
    result = decoder.decode(prompts, 25, on_step=lambda report: steps.append(report.new[0]))
    assert [token for tokens in steps for token in tokens] == result.tokens[0]
    assert len(steps[0]) == 1, "the prompt's own pass gives the first token"
    assert [len(tokens) for tokens in steps[1:]] == result.stats.num_emitted[0]


class _Poison:
    """Makes the target's logits NaN from some forward pass on."""

    def __init__(self, model, first_call):
        self.calls = 0
        self.first_call = first_call
        self.handle = model.get_output_embeddings().register_forward_hook(self)

    def __call__(self, module, args, output):
        self.calls += 1
        return output * float("nan") if self.calls > self.first_call else output


@pytest.mark.parametrize(("first_call", "where"), [(0, r"while the prompt was run \(step 0\)"), (3, "at step 3")])
def test_nan_logits_are_an_error_that_names_the_step(generator, first_call, where):
    model = build_model("llama")
    poison = _Poison(model, first_call)
    with pytest.raises(NonFiniteLogitsError, match=f"model: expected finite logits, got NaN {where}"):
        Decoder(model).decode(random_prompts(generator, [5]), 10)
    assert model.config._attn_implementation != "specdec"
    poison.handle.remove()
    assert len(Decoder(model).decode(random_prompts(generator, [5]), 10).tokens[0]) == 10


@pytest.mark.parametrize("family", ["llama", "llama3"])
def test_the_model_can_be_trained_after_decoding(family, generator):
    model = build_model(family)
    rotary = model.model.rotary_emb

    def make_table_in_the_pass(module, args, output):
        module.register_buffer("inv_freq", module.inv_freq * 1, persistent=False)

    handle = rotary.register_forward_hook(make_table_in_the_pass)  # as dynamic rope scaling does
    (prompt,) = random_prompts(generator, [6])
    Decoder(model, PromptLookup()).decode([prompt], 6)
    handle.remove()
    assert not rotary.inv_freq.is_inference()
    model(prompt[None], labels=prompt[None]).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_callbacks_run_outside_of_inference_mode(model, generator):
    modes = []
    (prompt,) = random_prompts(generator, [6])
    Decoder(model).decode([prompt], 4, on_step=lambda _: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [False] * 4


def test_prompts_that_cannot_be_decoded_are_refused(plain):
    with pytest.raises(ValueError, match=r"prompts: expected 1-D tensors of at least one token, got shapes \[\]"):
        plain.decode([], 4)
    with pytest.raises(ValueError, match=r"got shapes \[\[0\]\]"):
        plain.decode([torch.zeros(0, dtype=torch.int64)], 4)
    with pytest.raises(ValueError, match=r"max_new_tokens: expected 1 to 252 after a prompt of 4 tokens .*, got 300"):
        plain.decode([torch.ones(4, dtype=torch.int64)], 300)


def test_a_tree_as_deep_as_the_sliding_window_is_refused():
    with pytest.raises(ValueError, match="tree: expected a depth below the target's sliding window of 12, got 12"):
        Decoder(build_model("mistral_window"), PromptLookup(num_draft_tokens=12))


@pytest.mark.parametrize(
    ("prompts", "got"), [([torch.tensor([1.5, 2.0])], "torch.float32 values"), ([[1, 2]], "list"), ("ab", "str")]
)
def test_prompts_are_token_ids(prompts, got):
    with pytest.raises(TypeError, match=rf"prompts: expected 1-D tensors of token ids, got {got}"):
        Decoder(build_model("llama")).decode(prompts, 4)


def test_a_drafter_is_no_name():
    with pytest.raises(
        TypeError, match="drafter: expected a Drafter, as specdec.load_drafter gives, got 'prompt_lookup'"
    ):
        Decoder(build_model("llama"), "prompt_lookup")


def test_statistics_of_a_hand_written_run():
    # depths 3 and 2 are tried and fail at 2; the last step is cut by the end of the text after one accepted token
    stats = AcceptanceStats([[4, 2, 2]], [[3, 2, 3]], lossless=True, times_ms={}, num_target_passes=3)
    assert stats.tau == pytest.approx(8 / 3)
    assert stats.acceptance_at_depth == [1.0, 0.5, 1.0]
    assert stats.histogram == {2: 2, 4: 1}
    nothing = AcceptanceStats([[]], [[]], lossless=True, times_ms={}, num_target_passes=0)
    assert nothing.tau != nothing.tau
    assert nothing.acceptance_at_depth == []
