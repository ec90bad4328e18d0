"""Drafters with networks: what they propose is what their network says about the committed text, step after step.

Losslessness does not depend on it: a drafter whose state has gone wrong still gives the right text, only more slowly.
"""

import pytest
import torch

from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model, random_prompts
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.medusa import Medusa
from specdec.loop.decoder import Decoder
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(3),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "leaves at every depth": TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
}


def record_drafts(drafter):
    """Keep every tree, and what was emitted with each step, of whatever copy of the drafter a decoder works with."""
    drafts, emitted, kind = [], [], type(drafter)

    class Recorded(kind):
        def draft(self, root, choose):
            drafts.append(super().draft(root, choose))
            return drafts[-1]

        def commit(self, verdict, output):
            emitted.append(verdict.num_emitted.tolist())
            super().commit(verdict, output)

    drafter.__class__ = Recorded
    return drafts, emitted


def contexts(recorded, row, prompt, tokens):
    """The trees that were proposed in a row until it ended, each with the tokens that were committed before."""
    text, length = torch.cat((prompt, torch.tensor(tokens))), len(prompt)
    for tree, emitted in zip(*recorded, strict=True):
        if length >= len(text) - 1:
            return
        yield tree, text[:length]
        length += emitted[row]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("family", ["llama", "mistral_window", "opt"])
def test_a_model_that_drafts_for_itself_is_always_right(family, shape, generator):
    model = build_model(family)
    prompts = random_prompts(generator, [9, 4, 13])
    result = Decoder(model, DraftModel(model, shape)).decode(prompts, 1 + 5 * (shape.max_depth + 1))
    assert result.stats.num_emitted == [[shape.max_depth + 1] * 5] * 3


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_draft_model_proposes_its_top_k_after_every_node(shape, generator):
    model, small = build_model("llama"), build_model("llama", seed=1)
    prompts = random_prompts(generator, [9, 4])
    drafter = DraftModel(small, shape)
    recorded = record_drafts(drafter)
    result = Decoder(model, drafter).decode(prompts, 12)
    for row, prompt in enumerate(prompts):
        for tree, text in contexts(recorded, row, prompt, result.tokens[row]):
            for node in range(1, shape.num_nodes):
                path = [above for above in range(node) if shape.ancestors[node][above]]
                context = torch.cat((text, tree.tokens[row, path].long()))
                best = small(context[None]).logits[0, -1].topk(shape.max_rank + 1).indices
                assert tree.tokens[row, node] == best[shape.rank[node]]


@torch.no_grad()
def test_medusa_proposes_the_top_k_of_every_head_at_the_last_accepted_token(generator):
    model = build_model("llama")
    heads = MedusaHeads(MedusaConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads=3))
    heads.start_from(model.get_output_embeddings().weight)
    heads.block_bias.copy_(0.5 * torch.randn(heads.block_bias.shape, generator=generator))
    shape = SHAPES["leaves at every depth"]
    drafter = Medusa(heads, shape)
    recorded = record_drafts(drafter)
    prompts = random_prompts(generator, [9, 4])
    result = Decoder(model, drafter).decode(prompts, 40)
    assert result.stats.tau > 1, "nothing was ever accepted: the test did not see an accepted path"
    for row, prompt in enumerate(prompts):
        for tree, text in contexts(recorded, row, prompt, result.tokens[row]):
            hidden = model.model(text[None]).last_hidden_state[:, -1]
            best = heads(hidden)[0].topk(shape.max_rank + 1).indices
            for node in range(1, shape.num_nodes):
                assert tree.tokens[row, node] == best[shape.depth[node] - 1, shape.rank[node]]
