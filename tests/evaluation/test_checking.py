"""specdec.check: where a text leaves that of plain decoding, and by how much."""

import pytest
import torch

from lib.families import build_model, random_prompts
from specdec.evaluation.checking import first_divergence
from specdec.models.target.target import Target


def test_the_first_difference_is_found_with_its_margin(generator):
    model = build_model("llama")
    target, (prompt,) = Target(model), random_prompts(generator, [5])
    expected = [4, 9, 2, 7]
    assert first_divergence(target, prompt, expected, [*expected]) is None
    found = first_divergence(target, prompt, expected, [4, 9, 3, 7], index=6)
    with torch.no_grad():
        logits = model(torch.cat((prompt, torch.tensor([4, 9])))[None]).logits[0, -1]
    assert (found.prompt, found.position, found.plain, found.speculative) == (6, 2, 2, 3)
    assert found.margin == pytest.approx(float(logits[2] - logits[3]), abs=1e-4)


@pytest.mark.parametrize("got", [[4, 9], [4, 9, 2, 7]], ids=["shorter", "longer"])
def test_a_text_that_ends_elsewhere_is_another_one(got, generator):
    found = first_divergence(Target(build_model("llama")), *random_prompts(generator, [5]), [4, 9, 2], got)
    assert found.position == min(3, len(got))
    assert found.margin == float("inf")
