"""FastMTP's loss against its formula, and what it trains against what is drafted."""

import pytest
import torch

from lib.drafter_checks import propose
from lib.eagle_checks import record_logits
from lib.families import build_model, random_prompts
from lib.mtp_files import randomized
from lib.objectives import read_by
from specdec.drafters.mtp import Mtp
from specdec.drafting.candidates import Candidates
from specdec.models.networks.mtp import MtpConfig, MtpNetwork
from specdec.models.target.target import Target
from specdec.training.objectives.mtp import MtpObjective
from specdec.trees.shape import TreeShape


def objective_of(model, **settings):
    """An objective around a random network."""
    return MtpObjective(randomized(MtpNetwork(MtpConfig.for_target(model.config))), Target(model), **settings)


@torch.no_grad()
def test_training_computes_what_drafting_computes(generator):
    """Guess i of a place is what a chain computes when its candidates happen to be the text."""
    model = build_model("llama")
    objective = objective_of(model, num_unrolled=4)
    (text,) = random_prompts(generator, [12])
    steps = record_logits(objective.network, model)
    objective(read_by(model, text[None], None))
    trained = [step.clone() for step in steps]  # one entry per place: all may be learnt
    assert [len(step) for step in trained] == [10, 9, 8, 7]
    for last_pair in (0, 3, 6):
        root = last_pair + 1
        wanted = iter(text[root + 1 :].tolist())
        steps.clear()

        def follow_text(*_, wanted=wanted):
            return Candidates(torch.tensor([[[next(wanted)]]]))

        propose(Mtp(objective.network, TreeShape.chain(4)), model, text[:root], int(text[root]), follow_text)
        for step, logits in enumerate(steps):
            expected = trained[step][last_pair]
            assert (logits[0, 0] - expected).abs().max() < 1e-4 * expected.abs().max(), (last_pair, step)


@torch.no_grad()
@pytest.mark.parametrize("teacher_weight", [0.0, 0.25, 1.0])
def test_the_loss_is_the_papers(teacher_weight, generator):
    model = build_model("llama")
    objective = objective_of(model, num_unrolled=3, decay=0.5, teacher_weight=teacher_weight)
    texts, mask = torch.stack(random_prompts(generator, [12, 12])), torch.rand(2, 12, generator=generator) < 0.5
    batch = read_by(model, texts, mask)
    guesses = record_logits(objective.network, model)
    parts = objective(batch)
    by_depth = []
    for step, logits in enumerate(guesses):
        terms = []
        places = [(row, place) for row in range(2) for place in range(2 + step, 12) if mask[row, place]]
        for own, (row, place) in zip(logits, places, strict=True):
            logps = own.log_softmax(-1)
            law = model.lm_head(batch.hidden[row, place - 1]).softmax(-1)
            terms.append(-(1 - teacher_weight) * logps[batch.labels[row, place]] - teacher_weight * (law * logps).sum())
        by_depth.append(torch.stack(terms).mean())
        torch.testing.assert_close(parts[f"depth_{step + 1}"], by_depth[-1])
    torch.testing.assert_close(parts["loss"], (4 * by_depth[0] + 2 * by_depth[1] + by_depth[2]) / 7)
