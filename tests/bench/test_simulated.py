"""What is made up: synthetic acceptance is what its profile says, and a step's bytes are as computed by hand."""

import pytest
import torch

from lib.twin import twin_prompts, twin_target
from specdec.bench.common.cost import Machine
from specdec.bench.common.traffic import count_reads, step_bytes
from specdec.bench.decoding.simulated import (
    DRAFTERS,
    PROFILES,
    AcceptanceProfile,
    SyntheticAcceptance,
    leftmost_path,
    random_drafter,
)
from specdec.loop.decoder import Decoder
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target():
    return twin_target()


@pytest.fixture(scope="module")
def prompts():
    return twin_prompts()


@pytest.fixture(scope="module")
def plain(target, prompts):
    return Decoder(target).decode(prompts, NEW_TOKENS).tokens


def synthetic(name, target, plain, profile, seed=0):
    return SyntheticAcceptance(random_drafter(name, target), torch.tensor(plain), profile, seed=seed)


def test_the_random_target_counts_upwards_with_a_wide_margin(target, prompts, plain):
    assert plain == [[(int(prompt[-1]) + 1 + i) % 256 for i in range(NEW_TOKENS)] for prompt in prompts]
    half = twin_target(torch.bfloat16)
    assert Decoder(half).decode(prompts, NEW_TOKENS).tokens == plain
    logits = target.read(torch.stack(prompts)).logits.topk(2).values
    assert (logits[..., 0] - logits[..., 1]).min() > 0.2 * logits.abs().max()


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_the_target_follows_as_deep_as_the_profile_says(name, target, prompts, plain):
    depths = {}
    for profile in ("always", "never"):
        drafter = synthetic(name, target, plain, PROFILES[profile])
        result = Decoder(target, drafter).decode(prompts, NEW_TOKENS)
        assert result.tokens == plain
        depths[profile] = [count - 1 for row in result.stats.num_emitted for count in row[:-1]]
    assert set(depths["never"]) == {0}
    if isinstance(drafter.shape, TreeShape):
        assert set(depths["always"]) == {drafter.planted_depth}
        # the nodes of lookahead's window are deeper, and can never be accepted
        assert name == "lookahead" or drafter.planted_depth == drafter.shape.max_depth
    elif name != "suffix":  # a tree of another shape at every step, and of suffix none where nothing matched
        assert min(depths["always"]) >= 1


@pytest.mark.parametrize("name", ["medusa", "eagle3", "lookahead"])
def test_the_drafter_and_the_target_do_all_their_work(name, target, prompts, plain, monkeypatch):
    """What is replaced are tokens: nodes, passes and the drafter's calls are those of the drafter alone."""
    calls = []
    for drafter in (random_drafter(name, target), synthetic(name, target, plain, PROFILES["never"])):
        inner = type(getattr(drafter, "drafter", drafter))
        seen = {"draft": 0, "commit": 0}
        for method in seen:
            original = getattr(inner, method)

            def counted(*args, original=original, method=method, seen=seen):
                seen[method] += 1
                return original(*args)

            monkeypatch.setattr(inner, method, counted)
        stats = Decoder(target, drafter).decode(prompts, 12).stats
        monkeypatch.undo()
        assert seen == dict.fromkeys(seen, stats.num_target_passes)
        calls.append(drafter.shape.num_nodes)
    assert calls[0] == calls[1]


def test_a_profile_has_the_tau_of_its_law(target, prompts, plain):
    profile = AcceptanceProfile("made up", (0.8, 0.5))
    assert profile.tau(3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    depths = profile.depths(4, 5000, 3, seed=2)
    assert 1 + depths.mean() == pytest.approx(profile.tau(3), abs=0.02)
    assert [(depths >= d).sum() / (depths >= d - 1).sum() for d in (1, 2, 3)] == pytest.approx(
        [0.8, 0.5, 0.5], abs=0.02
    )
    taus = {
        Decoder(target, synthetic("medusa", target, plain, profile, seed)).decode(prompts, NEW_TOKENS).stats.tau
        for seed in (1, 1, 2)
    }
    assert len(taus) == 2  # the seed decides
    with pytest.raises(ValueError, match="acceptance_at_depth: expected at least one probability"):
        AcceptanceProfile("bad", (1.2,))


def test_the_leftmost_path_follows_first_children():
    assert leftmost_path(TreeShape.from_k_config((2, 3)).rank_paths) == [0, 1, 3]
    assert leftmost_path(TreeShape.none().rank_paths) == [0]
    assert leftmost_path([(), (1,), (4,), (1, 2), (1, 0), (3, 0)]) == [0, 1, 4]


# Bytes


def test_bytes_of_a_step_are_those_computed_by_hand(target):
    config, width, vocab = target.model.config, 64, 256
    heads = random_drafter("medusa", target)
    found = step_bytes(target, heads, count_reads(target, heads), lengths=[100, 50], expected_new=10)
    layer = width * (64 + 32 + 32 + 64) + 3 * width * 96 + 2 * width
    assert found.target_weights == 4 * (config.num_hidden_layers * layer + width + vocab * width)
    assert found.target_cache == 170 * 7 * 2 * 2 * 16 * 4
    assert found.drafter_weights == 4 * 4 * (width * width + width + width * vocab)  # four of the five heads
    assert found.drafter_cache == 0
    machine = Machine("made up", bytes_per_s=1e9, flops_per_s=1e12)
    assert found.floor_ms(machine) == pytest.approx(found.total / 1e6)


def test_a_sequential_drafter_reads_its_layer_once_per_depth(target):
    eagle = random_drafter("eagle", target)
    reads = count_reads(target, eagle)
    passes = eagle.shape.max_depth
    assert reads["layers.0.self_attn.q_proj.weight"] == reads["target.lm_head.weight"] == passes == 5
    found = step_bytes(target, eagle, reads, lengths=[100])
    assert found.drafter_cache == passes * 100 * 2 * 2 * 16 * 4
    grown = random_drafter("eagle2", target)
    assert isinstance(grown.shape, DynamicTree)
    assert count_reads(target, grown)["target.lm_head.weight"] == grown.shape.depth + 1
    assert count_reads(target, random_drafter("parallelspec", target))["target.lm_head.weight"] == 1
    assert count_reads(target, random_drafter("prompt_lookup", target)) == {}
