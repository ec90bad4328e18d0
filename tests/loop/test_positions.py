"""With naive acceptance a seed gives the text of plain decoding: its numbers belong to places in the output."""

from functools import lru_cache

import pytest
import torch
from transformers import GenerationConfig

import specdec
from lib.law_drafters import DRAFTERS, SAMPLING_RULES, build_target, judged_by, make_drafter
from lib.replays import same, two_decoders
from specdec.common.randomness import Stream, Uniforms, row_seeds
from specdec.drafting.base import Prompt, Room
from specdec.kernels.sample_probs import WarpSettings
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.rules import RULES, Naive
from specdec.loop.state import DecodeState
from specdec.models.target.target import Target

NAIVE = {name: rule for name, rule in SAMPLING_RULES.items() if isinstance(rule, Naive)}
CASES = judged_by(NAIVE)
PROMPTS = [torch.tensor([2, 4, 1, 2, 4, 3, 0, 2, 4]), torch.tensor([5, 5, 6]), torch.tensor([1, 0, 3, 6, 2])]
SEEDS = {"one seed": 3, "another": 4, "a seed per row": [2**40, 7, 7]}
NUM_TOKENS = 18
DEPTHS = torch.tensor([[0, 1, 1, 2, 7]], dtype=torch.int32)


def decode(decoder, seed, rows=(0, 1, 2)):
    """The rows' texts, drawn from processed laws."""
    prompts = [PROMPTS[row] for row in rows]
    lengths = [*map(len, prompts)]
    config = GenerationConfig(temperature=0.8, top_k=6, top_p=0.95, repetition_penalty=1.2)
    sizes = {"prompt_lengths": lengths, "width": max(lengths), "max_new_tokens": NUM_TOKENS}
    processing = Processing(config, do_sample=True, **sizes, backend=decoder.backend)
    return decoder.decode(prompts, NUM_TOKENS, seed=seed, processing=processing)


@lru_cache
def plain_text(name):
    """The rows' texts of a seed without a drafter."""
    return decode(Decoder(build_target(), acceptance=Naive()), SEEDS[name]).tokens


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "rule"), CASES, ids=["-".join(case) for case in CASES])
def test_a_seed_gives_the_text_of_plain_decoding(kind, rule, monkeypatch):
    """Eagerly, and by replays of a recorded step, whose numbers are the generation's and not the recording's."""
    eager, replayed = two_decoders(kind, NAIVE[rule], monkeypatch)
    for name, seed in SEEDS.items():
        result = decode(eager, seed)
        assert result.tokens == plain_text(name)
        same(decode(replayed, seed), result)
    assert replayed.captured.graphs.num_recorded == eager.drafter.num_ways


def test_the_comparison_is_of_texts_that_steps_emit_in_pieces():
    decoders = [Decoder(build_target(), make_drafter(kind), acceptance=Naive()) for kind in DRAFTERS]
    lengths = [decode(decoder, 3).stats.tau for decoder in decoders]
    assert sum(tau > 1.1 for tau in lengths) > len(lengths) / 2
    assert len({tuple(row) for name in SEEDS for row in plain_text(name)}) == 9  # other rows and other seeds


@pytest.mark.parametrize("kind", ["draft_tree", "dspark, grown", "suffix"])
def test_neither_companions_nor_calls_before_change_a_text(kind):
    decoder = Decoder(build_target(), make_drafter(kind), acceptance=Naive())
    seeds, texts = SEEDS["a seed per row"], plain_text("a seed per row")
    for rows in ((0,), (2,), (2, 0), (1, 1, 0, 2), (0,)):
        assert decode(decoder, [seeds[row] for row in rows], rows).tokens == [texts[row] for row in rows]


@pytest.mark.parametrize("kind", ["prompt_lookup", "draft_tree", "medusa", "eagle", "dflash, grown", "dspark, grown"])
def test_generate_gives_the_text_that_it_gives_without_a_drafter(kind):
    ids = torch.tensor([[0, 0, 2, 4, 1, 2], [3, 1, 4, 1, 5, 2]])
    settings = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]), "do_sample": True, "seed": 3}
    settings |= {"temperature": 0.9, "num_return_sequences": 2, "eos_token_id": 6, "pad_token_id": 0}
    settings |= {"max_new_tokens": 24, "acceptance": "naive"}
    found = specdec.generate(build_target(), make_drafter(kind), ids, **settings)
    assert torch.equal(found, specdec.generate(build_target(), None, ids, **settings))
    assert not torch.equal(found, specdec.generate(build_target(), None, ids, **settings | {"seed": 4}))


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule().samples])
def test_every_rule_that_samples_begins_with_the_same_token(rule):
    decoder = Decoder(build_target(), make_drafter("draft_chain"), acceptance=RULES[rule]())
    first = [row[0] for row in plain_text("a seed per row")]
    assert [row[0] for row in decode(decoder, SEEDS["a seed per row"]).tokens] == first


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_number_is_that_of_its_row_and_its_place(backend, device):
    seeds, num_output = row_seeds(5, 4).to(device), torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=device)
    tables = []
    for num_positions in (9, 64, 131):
        uniforms = Uniforms(seeds, num_output=num_output.clone(), num_positions=num_positions, backend=backend)
        uniforms.step.fill_(num_positions)
        uniforms.fill_positions()
        places = torch.arange(num_positions, dtype=torch.int32, device=device)[None] - num_output[:, None]
        tables.append(uniforms.at(places))
        at_nodes = uniforms.at(DEPTHS.to(device))
        wanted = (num_output[:, None] + DEPTHS.to(device)).clamp(max=num_positions - 1)
        assert torch.equal(at_nodes, tables[-1].gather(1, wanted.long()))
    assert torch.equal(tables[0], tables[1][:, :9])
    assert torch.equal(tables[1], tables[2][:, :64])
    assert tables[2].unique().numel() > 4 * 131 - 3, "one number serves two places"
    uniforms.step.zero_()
    for stream in range(Stream.DRAFT + 64):
        assert not (uniforms.draw(stream, 131) == tables[2]).all(1).any(), "as drawn for something else"


def test_a_generation_draws_its_numbers_into_the_place_of_those_before():
    target, room = Target(build_target()), Room(batch_size=3, max_length=16, max_prompt=8, max_new_tokens=8)
    state = DecodeState.new(target, room, num_nodes=3, max_depth=2, device=target.device)
    prompt = Prompt.padded(PROMPTS[1:], 3, 16, target.device)
    table, found = state.uniforms._by_position, []
    for seed in (1, 2, 1):
        state.begin(prompt, 8, row_seeds(seed, 2), WarpSettings().on(target.device))
        state.num_output.add_(2)
        found.append(state.uniforms.at(DEPTHS))
        expected = Uniforms(row_seeds(seed, 2), num_positions=9)
        expected.fill_positions()
        assert torch.equal(found[-1][:2], expected.at(DEPTHS + 2))
        state.uniforms.step.add_(5)  # as steps do
    assert state.uniforms._by_position is table
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0][:2], found[1][:2])


def test_numbers_by_place_must_be_asked_for():
    with pytest.raises(ValueError, match="num_positions: expected 1 or more .* got 0"):
        Uniforms(row_seeds(1, 2)).at(DEPTHS)
