"""The prompt lookup drafter against a plain search through the text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.drafter_checks import start_texts
from lib.families import build_model
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafting.candidates import Best
from specdec.kernels.common.verdict import Verdict
from specdec.models.target.target import Target

TARGET = Target(build_model("llama"))


def search(text: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """What follows the longest, most recent earlier occurrence of the end of `text`."""
    for size in range(max_ngram, 0, -1):
        if len(text) <= size:
            continue
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + num_tokens]
    return []


def proposed(tree, row):
    return [int(token) for token, parent in zip(tree.tokens[row], tree.parent[row], strict=True) if parent >= 0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_proposes_what_a_plain_search_finds(data):
    max_ngram = data.draw(st.integers(1, 4))
    num_tokens = data.draw(st.integers(1, 6))
    texts = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=12), min_size=1, max_size=3))
    drafter = PromptLookup(max_ngram=max_ngram, num_draft_tokens=num_tokens)
    start_texts(drafter, TARGET, texts)
    roots = [data.draw(st.integers(1, 4)) for _ in texts]
    finished = [False] * len(texts)
    for _ in range(4):
        tree = drafter.draft(torch.tensor(roots, dtype=torch.int32), Best())
        width = tree.max_depth + 1
        emitted = torch.full((len(texts), width), -1, dtype=torch.int32)
        accepted = torch.full((len(texts),), -1, dtype=torch.int32)
        for row, text in enumerate(texts):
            expected = search([*text, roots[row]], max_ngram, num_tokens)
            assert tree.tokens[row, 0] == roots[row]
            assert proposed(tree, row) == expected
            assert tree.deepest[row] == len(expected)
            finished[row] |= data.draw(st.booleans()) and data.draw(st.booleans())
            if finished[row]:
                continue  # the row emits nothing more; its root stays
            count = data.draw(st.integers(0, len(expected)))
            new_root = data.draw(st.integers(1, 4))
            emitted[row, : count + 1] = torch.tensor([*expected[:count], new_root])
            accepted[row] = count
            text += [roots[row], *expected[:count]]
            roots[row] = new_root
        drafter.commit(Verdict(emitted, accepted, torch.tensor(roots), emitted), None)


@pytest.mark.parametrize("name", ["max_ngram", "num_draft_tokens"])
def test_rejects_settings_below_one(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        PromptLookup(**{name: 0})
