"""specdec.check: where a text leaves that of plain decoding, and by how much."""

from dataclasses import replace

import pytest
import torch

from lib.families import build_model, random_prompts
from specdec.bundled.load import load_tiny
from specdec.evaluation.checking import first_divergence
from specdec.loop.decoder import Decoder
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_explains_a_near_tie_in_half_precision_alone(dtype):
    model, tokenizer = load_tiny(dtype=dtype)
    target = Target(model)
    prompt = tokenizer("def add(a, b):\n", return_tensors="pt").input_ids[0]
    (expected,) = Decoder(target).decode([prompt], 1).tokens
    with torch.no_grad():
        logits = model(prompt[None]).logits[0, -1].float()
    far = first_divergence(target, prompt, expected, [int(logits.argmin())])
    assert far.is_error
    assert far.margin > far.tolerance
    is_half = dtype is torch.bfloat16
    assert far.tolerance == pytest.approx(4 * 2**-7 * float(logits.abs().amax()) if is_half else 0.0, rel=0.05)
    assert replace(far, margin=far.tolerance / 2).is_error == (not is_half)
