"""The suffix drafter against its definition, counted in plain Python over whole texts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.drafter_checks import start_texts
from lib.families import build_model
from specdec.drafters.load import load_drafter
from specdec.drafters.weightless.suffix import Suffix
from specdec.drafting.candidates import Best
from specdec.kernels.common.verdict import Verdict
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree

TARGET = Target(build_model("llama"))


def continuations(text, others, longest, depth):
    """What followed each occurrence of the text's end before, with the length of its match."""
    found = []
    for source in [text, *others]:
        for place in range(len(source) - 1):
            match = 0
            while (
                match < longest and match < len(text) and match <= place and source[place - match] == text[-1 - match]
            ):
                match += 1
            if match and (source is not text or place < len(text) - 1):
                found.append((match, source[place + 1 : place + 1 + depth]))
    return found


def reaches(text, others, longest, depth):
    """The reach of every path that some occurrence goes."""
    found = continuations(text, others, longest, depth)
    best = {}
    for length in range(1, longest + 1):
        matching = [tokens for match, tokens in found if match >= length]
        for tokens in matching:
            reach, before = 1.0, len(matching)
            for k in range(1, len(tokens) + 1):
                path = tuple(tokens[:k])
                count = sum(tuple(other[:k]) == path for other in matching)
                reach *= count / (before + 1 / (length + k - 1))
                before = count
                best[path] = max(best.get(path, 0.0), reach)
    return best


def write(drafter, answer):
    """Let a generation of one row emit these tokens, one a step."""
    for token in answer:
        drafter.draft(torch.tensor([token], dtype=torch.int32), Best())
        none = torch.full((1, drafter.shape.max_depth + 1), -1, dtype=torch.int32)
        drafter.commit(Verdict(none, torch.zeros(1, dtype=torch.int32), none[:, 0], none), None)


def paths_of(tree, row):
    """The path of every node that a row uses."""
    paths = [()]
    for node in range(1, tree.tokens.shape[1]):
        above = int(tree.parent[row, node])
        paths.append(None if above < 0 else (*paths[above], int(tree.tokens[row, node])))
    return [path for path in paths[1:] if path is not None]


def check(tree, row, expected, num_draft_tokens, min_probability):
    paths = paths_of(tree, row)
    assert len(set(paths)) == len(paths)
    likely = sorted((reach for reach in expected.values() if reach >= min_probability), reverse=True)[:num_draft_tokens]
    got = sorted((expected[path] for path in paths), reverse=True)
    assert got == pytest.approx(likely, rel=1e-5)
    assert int(tree.deepest[row]) == max(map(len, paths), default=0)
    sums = [0.0]
    for parent, logp in zip(tree.parent[row, 1:].tolist(), tree.logps[row, 1:].tolist(), strict=True):
        sums.append(math.nan if parent < 0 else sums[parent] + logp)
    # padding comes last
    assert sums[1 : len(paths) + 1] == pytest.approx([math.log(expected[path]) for path in paths], abs=1e-4)


TOKENS = st.integers(1, 3)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_proposes_the_likeliest_continuations(data):
    longest, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    num_draft_tokens = data.draw(st.integers(1, 9))
    texts = data.draw(st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=1, max_size=3))
    corpus = data.draw(st.none() | st.lists(st.lists(TOKENS, max_size=9), min_size=1, max_size=3))
    limits = {"num_draft_tokens": num_draft_tokens, "max_depth": depth, "max_match": longest}
    drafter = Suffix(**limits, corpus=corpus, min_probability=0.0101, num_occurrences=64)
    start_texts(drafter, TARGET, texts)
    for step in range(4):
        roots = [data.draw(TOKENS) for _ in texts]
        tree = drafter.draft(torch.tensor(roots, dtype=torch.int32), Best(with_logps=True))
        width = tree.max_depth + 1
        emitted = torch.full((len(texts), width), -1, dtype=torch.int32)
        accepted = torch.full((len(texts),), -1, dtype=torch.int32)
        for row, text in enumerate(texts):
            expected = reaches([*text, roots[row]], corpus or [], longest, depth)
            check(tree, row, expected, num_draft_tokens, 0.0101)
            if row == 0 and step > 1:
                continue  # it has finished: its root comes again and again
            count = data.draw(st.integers(0, depth))
            new = [data.draw(TOKENS) for _ in range(count)]
            emitted[row, : count + 1] = torch.tensor([*new, 1])
            accepted[row] = count
            text += [roots[row], *new]
        drafter.commit(Verdict(torch.zeros_like(emitted), accepted, emitted[:, 0], emitted), None)


def test_looks_at_the_longest_matches_first():
    """Of many occurrences of the last token only those count that a longer end of the text has."""
    text = [7, 8, 9, 5, *([1, 9, 6] * 20), 7, 8]
    drafter = Suffix(num_draft_tokens=3, num_occurrences=2)
    start_texts(drafter, TARGET, [text])
    assert (5,) in paths_of(drafter.draft(torch.tensor([9], dtype=torch.int32), Best()), 0)


def test_answers_of_earlier_calls_are_kept_and_the_oldest_go_first():
    drafter = Suffix(shared=True, max_corpus_tokens=24, max_match=2, num_draft_tokens=4)
    answers = [[*range(10, 20)], [*range(20, 30)], [*range(30, 40)]]
    for answer in answers:
        start_texts(drafter, TARGET, [[1, 2]])
        write(drafter, answer)
    start_texts(drafter, TARGET, [[1, 2]])
    proposed = {
        answer[0]: paths_of(drafter.draft(torch.tensor([answer[0]], dtype=torch.int32), Best()), 0)
        for answer in answers
    }
    assert [len(proposed[answer[0]]) for answer in answers] == [0, 4, 4]
    assert proposed[30][0] == (31,)


def test_a_prompt_is_not_shared():
    drafter = Suffix(shared=True)
    start_texts(drafter, TARGET, [[*range(1, 20)]])
    write(drafter, [*range(20, 40)])
    start_texts(drafter, TARGET, [[40]])
    assert paths_of(drafter.draft(torch.tensor([25], dtype=torch.int32), Best()), 0)
    assert not paths_of(drafter.draft(torch.tensor([5], dtype=torch.int32), Best()), 0)


def test_a_tree_says_how_many_nodes_and_how_deep():
    drafter = load_drafter("suffix", TARGET, tree=DynamicTree(num_nodes=6, depth=2, top_k=3))
    assert (drafter.shape.num_nodes, drafter.shape.max_depth) == (6, 3)
    with pytest.raises(ValueError, match="tree: expected a DynamicTree"):
        load_drafter("suffix", TARGET, tree=3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_match": 0}, ValueError, "max_match: expected at least 1, got 0"),
        ({"min_probability": 1.5}, ValueError, "min_probability: expected 0 to 1, got 1.5"),
        ({"min_probability": math.nan}, ValueError, "min_probability: expected 0 to 1, got nan"),
        ({"corpus": []}, ValueError, "corpus: expected at least one text, got none"),
        (
            {"corpus": ["a text"]},
            TypeError,
            "corpus: expected a sequence of token ids per text, got 'a text' as text 0",
        ),
        ({"corpus": [[1], [2, -3]]}, ValueError, "corpus: expected token ids of 0 or more, got -3 in text 1"),
        (
            {"corpus": [[1] * 9], "max_corpus_tokens": 9},
            ValueError,
            "corpus: expected at most max_corpus_tokens=9 tokens, with one behind every text, got 10",
        ),
    ],
)
def test_bad_settings_are_named(given, error, message):
    with pytest.raises(error, match=message):
        load_drafter("suffix", TARGET, **given)


def test_a_corpus_of_another_vocabulary_is_named():
    drafter = Suffix(corpus=[[1, TARGET.vocab_size]])
    with pytest.raises(ValueError, match=f"corpus: expected tokens below {TARGET.vocab_size}, got {TARGET.vocab_size}"):
        drafter.bind(TARGET)
