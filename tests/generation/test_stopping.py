"""Texts end at the exact token, also in the middle of an accepted block, and everything returned agrees about it."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MaxLengthCriteria, StoppingCriteria

import specdec
from lib.drafter_checks import Nudged
from lib.families import VOCAB_SIZE, build_model, pad, random_prompts
from lib.fuzz_calls import random_tree
from lib.host_code import EndsAt, KeepingStreamer, noisy_copy
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from lib.law_drafters import VOCAB_SIZE as SMALL_VOCAB_SIZE
from lib.scripted_drafters import oracle
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Greedy
from specdec.models.target.target import Target

MODEL = build_model("llama")
PROMPT = torch.randint(1, VOCAB_SIZE, (7,), generator=torch.Generator().manual_seed(5))
PLAIN = Decoder(MODEL).decode([PROMPT], 40).tokens[0]


@given(st.integers(1, 40), st.sampled_from([(1,), (5,), (3, 2), (2, 2, 2)]))
@settings(max_examples=20, deadline=None)
def test_a_criterion_ends_the_text_at_any_token_of_a_block(length, tree):
    shape = specdec.as_tree_shape(tree)
    criterion, streamer = EndsAt(7 + length), KeepingStreamer()
    settings = {"max_new_tokens": 40, "output_scores": True, "return_dict_in_generate": True}
    code = {"stopping_criteria": [criterion], "streamer": streamer}
    output = specdec.generate(MODEL, oracle(shape, [PLAIN], VOCAB_SIZE), PROMPT[None], **settings, **code)
    assert output.sequences[0, 7:].tolist() == PLAIN[:length]
    streamer.check(output.sequences[0].tolist())
    assert criterion.seen == list(range(8, 8 + length)), "every prefix once, in order"
    assert len(output.scores) == length
    assert output.past_key_values.get_seq_length() == 7 + length - 1
    assert sum(output.stats.num_emitted[0]) == length - 1  # prefill's token is no step's


def test_custom_criteria_hold_for_each_row_alone(generator):
    prompts = random_prompts(generator, [4, 9, 6])
    ids, mask = pad(prompts, "left")

    class Odd(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, -1] % 7 == 3) & torch.tensor(input_ids.shape[1] > 12)

    got = specdec.generate(
        MODEL, noisy_copy(MODEL), ids, attention_mask=mask, tree=(3, 2), max_new_tokens=30, stopping_criteria=[Odd()]
    )
    for row, prompt in enumerate(prompts):
        greedy = {"attention_mask": torch.ones(1, len(prompt)), "do_sample": False, "max_new_tokens": 30}
        alone = MODEL.generate(prompt[None], stopping_criteria=[Odd()], **greedy)[0, len(prompt) :]
        assert torch.equal(got[row, ids.shape[1] :][: len(alone)], alone)
        assert (got[row, ids.shape[1] + len(alone) :] == 0).all()


def test_stop_strings_end_the_text_where_transformers_ends_it():
    model, tokenizer = specdec.load_tiny()
    ids = tokenizer("def add(a, b):\n    return", return_tensors="pt").input_ids
    for strings in (["\n"], ["self", ")"], "return"):
        arguments = {"max_new_tokens": 60, "stop_strings": strings, "tokenizer": tokenizer}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **arguments)
        got = specdec.generate(model, "prompt_lookup", ids, do_sample=False, **arguments)
        assert torch.equal(got, expected)
        assert got.shape[1] < ids.shape[1] + 60, "the text did not stop"


def test_max_time_ends_the_text_after_the_step_that_is_running():
    class Slow(PromptLookup):
        def draft(self, root, choose):
            time.sleep(0.05)
            return super().draft(root, choose)

    output = specdec.generate(
        MODEL, Slow(), PROMPT[None], max_new_tokens=200, max_time=0.3, return_dict_in_generate=True
    )
    assert 1 <= output.stats.num_target_passes <= 8
    assert output.sequences[0, 7:].tolist()[:40] == PLAIN[: output.sequences.shape[1] - 7]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "mistral_window", "opt"])
def test_transformers_goes_on_from_the_returned_cache(family, side, generator):
    model = build_model(family)
    prompts = random_prompts(generator, [8, 3, 6])
    ids, mask = pad(prompts, side)
    plain = specdec.generate(model, None, ids, attention_mask=mask, max_new_tokens=40)
    stop = int(plain[1, ids.shape[1] + 5])  # row 1 ends early
    settings = {"max_new_tokens": 16, "eos_token_id": stop, "pad_token_id": 0, "return_dict_in_generate": True}
    output = specdec.generate(model, noisy_copy(model), ids, attention_mask=mask, tree=(3, 2), **settings)
    real = torch.cat((mask, torch.ones_like(output.sequences[:, ids.shape[1] :])), 1)
    for row, counts in enumerate(output.stats.num_emitted):
        real[row, ids.shape[1] + 1 + sum(counts) :] = 0
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    # one more token by transformers' own forward over its cache against a fresh forward over each row's text
    known = {"past_key_values": output.past_key_values, "attention_mask": real}
    with torch.no_grad():
        position = real.cumsum(1)[:, -1:] - 1
        logits = model(output.sequences[:, -1:], position_ids=position, **known).logits[:, -1]
    for row in (0, 2):
        if real[row, -1] == 0:
            continue
        text = output.sequences[row][real[row].bool()]
        with torch.no_grad():
            expected = model(text[None]).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    tree=st.sampled_from([(5,), (3, 2), (2, 2, 2)]),
)
@settings(max_examples=15, deadline=None)
def test_a_batch_gives_its_rows_own_results_and_the_cache_of_a_fresh_prefill(seed, lengths, tree):
    generator = torch.Generator().manual_seed(seed)
    prompts = random_prompts(generator, lengths)
    alone = [Decoder(MODEL).decode([prompt], 14).tokens[0] for prompt in prompts]
    stop = alone[0][9]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in alone]
    shape = specdec.as_tree_shape(tree)
    drafter = oracle(shape, [row + [0] * 20 for row in alone], VOCAB_SIZE)
    decoder = Decoder(MODEL, Nudged(drafter, alone, prompts, seed=seed))
    result = decoder.decode(prompts, 14, stop_tokens=[stop], keep_cache=True)
    assert result.tokens == expected
    target = Target(MODEL)
    for row, prompt in enumerate(prompts):
        text = torch.cat((prompt, torch.tensor(expected[row][:-1], dtype=torch.int64)))
        assert int(result.cache.lengths[row]) == len(text)
        with torch.inference_mode(), target.hooked():
            fresh = target.new_cache(1, len(text))
            target.prefill(text[None], torch.tensor([len(text)], dtype=torch.int32), fresh)
        torch.testing.assert_close(
            result.cache.data[:, :, row, : len(text)], fresh.data[:, :, 0, : len(text)], atol=2e-5, rtol=2e-5
        )


@given(
    st.sampled_from(sorted(DRAFTERS)),
    st.lists(st.lists(st.integers(0, SMALL_VOCAB_SIZE - 1), min_size=1, max_size=9), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_a_sampled_row_does_not_depend_on_its_companions(kind, texts, chance):
    rows = [(torch.tensor(text), chance.randrange(2**62)) for text in texts]
    decoder = Decoder(build_target(), make_drafter(kind), acceptance=specdec.Naive())
    if decoder.drafter.can_sample and chance.random() < 0.7:
        decoder.acceptance = specdec.Rejection()

    def decode(some):
        return decoder.decode([text for text, _ in some], 9, stop_tokens=[3], seed=[seed for _, seed in some]).tokens

    alone = [decode([row])[0] for row in rows]
    order = chance.choices(range(len(rows)), k=chance.randint(1, 5))  # some are left out, some come twice
    assert decode([rows[row] for row in order]) == [alone[row] for row in order]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_cache_after_any_verdict_is_that_of_a_fresh_prefill(lengths, chance):
    tree, target = random_tree(chance, max_depth=5, max_rank=4, dense=False), Target(MODEL)
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    prompts = random_prompts(generator, lengths)
    tokens = torch.randint(1, VOCAB_SIZE, (len(prompts), tree.num_nodes), generator=generator)
    path = torch.full((len(prompts), tree.max_depth + 1), -1, dtype=torch.int32)
    for row in range(len(prompts)):
        nodes = [] if chance.random() < 0.2 else [0]  # none: the row had finished
        while nodes and chance.random() < 0.8 and nodes[-1] in tree.parent:
            nodes.append(chance.choice([node for node in range(tree.num_nodes) if tree.parent[node] == nodes[-1]]))
        path[row, : len(nodes)] = torch.tensor(nodes)
    num_accepted = (path >= 0).sum(1).int() - 1
    depth = torch.tensor(tree.depth, dtype=torch.int32)[None]
    with torch.inference_mode(), target.hooked():
        cache = target.new_cache(len(prompts), max(lengths) + tree.num_nodes)
        ids, mask = pad(prompts, "right")
        target.prefill(ids, mask.sum(1).int(), cache)
        target.score(tokens, depth, torch.tensor(tree.ancestor_words, dtype=torch.int32)[None], cache)
        cache.commit(path, num_accepted)
        for row, prompt in enumerate(prompts):
            text = torch.cat((prompt, tokens[row, path[row][path[row] >= 0].long()]))
            assert int(cache.lengths[row]) == len(text)
            fresh = target.new_cache(1, len(text))
            target.prefill(text[None], torch.tensor([len(text)], dtype=torch.int32), fresh)
            torch.testing.assert_close(
                cache.data[:, :, row, : len(text)], fresh.data[:, :, 0, : len(text)], atol=2e-5, rtol=2e-5
            )


def test_max_length_as_a_criterion_of_the_users(generator):
    (prompt,) = random_prompts(generator, [6])
    got = specdec.generate(MODEL, None, prompt[None], max_new_tokens=30, stopping_criteria=[MaxLengthCriteria(11)])
    assert got.shape[1] == 11


def test_the_rule_of_a_decoder_is_checked_against_its_drafter():
    from specdec.loop.rules import Rejection

    with pytest.raises(ValueError, match="acceptance: rejection needs a drafter that draws"):
        Decoder(MODEL, PromptLookup(), acceptance=Rejection())
    assert Decoder(MODEL, PromptLookup(), acceptance=Greedy()).acceptance.lossless
