"""P-EAGLE's training: the loss is that of drafting behind every pair, and deeper rows are learnt behind fewer."""

import pytest
import torch

from lib.drafter_checks import Recording, propose
from lib.families import build_model
from lib.objectives import new_objective, random_texts, read_by
from specdec.trees.shape import TreeShape


def make_objective(model, name="peagle", **switches):
    objective = new_objective(name, model, num_masks=3, **switches)
    with torch.no_grad():  # masks and layers all matter
        for parameter in objective.network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return objective.eval()


@pytest.mark.parametrize("name", ["peagle", "peagle, own vocabulary"])
@torch.no_grad()
def test_the_loss_is_that_of_drafting_behind_every_pair(name, generator):
    """The equation term by term, of what the drafter's law is behind every beginning of the text."""
    model = build_model("llama")
    objective = make_objective(model, name, keep_ratio=1.0, least_share=1.0)
    network = objective.network
    tokens, mask = random_texts(generator, (13, 10))
    batch = read_by(model, tokens, mask, tap_layers=objective.tap_layers)
    terms = [[] for _ in range(4)]
    for row, text in enumerate(tokens):
        for pair in range(len(text) - 2):
            choose = Recording()
            propose(objective.drafter(TreeShape.chain(4)), model, text[: pair + 1], text[pair + 1].item(), choose)
            for depth, place in enumerate(range(pair + 2, min(pair + 6, len(text)))):
                target = batch.scores.logits[row, place - 1].double()
                if depth and not mask[:, pair + 2].any():
                    continue  # nobody drafts there: a root is the target's own token
                if not mask[row, place] or (network.has_own_vocabulary and not network.t2d[target.argmax()]):
                    continue
                law = target[network.target_ids].softmax(-1)
                terms[depth].append(-float((law * choose.logits[0][0, depth].double().log_softmax(-1)).sum()))
    expected = {f"depth_{depth + 1}": sum(found) / len(found) for depth, found in enumerate(terms)}
    expected["loss"] = sum(map(sum, terms)) / sum(map(len, terms))
    assert {key: float(value) for key, value in objective(batch).items()} == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_deeper_rows_are_learnt_behind_fewer_pairs(generator):
    """Shares fall by the ratio, to the least one; a pair that has a depth has those above it; each has its turn."""
    model = build_model("llama")
    objective = make_objective(model, keep_ratio=0.6, least_share=0.3)
    tokens, mask = random_texts(generator, (42, 30), first_learnt=2)
    batch = read_by(model, tokens, mask, tap_layers=objective.tap_layers)
    fixed = [groups.tolist() for groups in objective._groups(batch)]
    assert fixed == [groups.tolist() for groups in objective._groups(batch)]
    objective.train()
    seen = set()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(50):
            depths = [set(groups.tolist()) for groups in objective._groups(batch)]
            assert depths[0] == set(range(40))
            # of the 24, 14 and 12 that the shares come to, the text ends before the guess of a few
            for depth, (found, most) in enumerate(zip(depths[1:], (24, 14, 12), strict=True), 1):
                assert most - 2 * depth <= len(found) <= most
                assert found <= depths[depth - 1]
                assert max(found) + depth < 40
            seen |= depths[1]
    assert seen == set(range(39))
