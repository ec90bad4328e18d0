"""Lookahead decoding against a literal statement of the algorithm: lists, a dict and one pass per question."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.drafter_checks import Nudged
from lib.families import build_model, random_prompts
from specdec.bundled.load import load_tiny
from specdec.drafters.weightless import lookahead
from specdec.drafters.weightless.lookahead import Lookahead, NgramPool
from specdec.loop.decoder import Decoder

SETTINGS = {
    "paper": {"level": 5, "window": 7, "guesses": 7},
    "few guesses": {"level": 4, "window": 6, "guesses": 2},
    "no warm-up": {"level": 2, "window": 4, "guesses": 3},
    "one column": {"level": 3, "window": 1, "guesses": 4},
}

REPETITIVE = "x = [1, 2, 3]\n" * 3


class Recording(Lookahead):
    """Keeps every tree, in a list that the copies which decoders work with share."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.trees = []

    def start(self, prompt, output):
        super().start(prompt, output)
        self.trees.clear()

    def draft(self, root, choose):
        self.trees.append(super().draft(root, choose))
        return self.trees[-1]


def decode_literally(model, prompt, max_new_tokens, *, level, window, guesses):
    """Lookahead decoding of one prompt.

    Returns:
        The emitted tokens, how many each step emitted, and per step the window (rows of tokens) and the guesses.
    """
    known = {}

    def next_token(tokens):
        if tuple(tokens) not in known:
            known[tuple(tokens)] = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        return known[tuple(tokens)]

    def initial(row, column):
        fraction = ((column * (level - 1) + row + 1) * 2654435769) % 2**32
        return prompt[fraction * len(prompt) // 2**32]

    rows = [[initial(row, column) for column in range(window)] for row in range(level - 1)]
    pool, text, emitted, num_emitted, steps = {}, list(prompt), [next_token(prompt)], [], []
    while len(emitted) < max_new_tokens:
        root = emitted[-1]
        rows[0][0] = root
        proposed = pool.get(root, [])[::-1]
        steps.append(([list(row) for row in rows], proposed))
        outputs = [
            next_token(text + rows[0][: column + 1] + [row[column] for row in rows[1:]]) for column in range(window)
        ]
        best = []
        for guess in proposed:
            accepted = []
            while len(accepted) < len(guess) and next_token([*text, root, *accepted]) == guess[len(accepted)]:
                accepted.append(guess[len(accepted)])
            best = max(best, accepted, key=len)
        new = [*best, next_token([*text, root, *best])][: max_new_tokens - len(emitted)]
        text += [root, *new[:-1]]
        emitted += new
        num_emitted.append(len(new))
        for column in range(window):
            ngram = (*(row[column] for row in rows[1:]), outputs[column])
            if len(steps) > level - 2:  # before that, tokens of the prompt stand in the rows
                kept = pool.setdefault(rows[0][column], [])
                if ngram in kept:
                    kept.remove(ngram)
                kept.append(ngram)
                del kept[:-guesses]
        rows = [*rows[1:], outputs]
    return emitted, num_emitted, steps


def paths_by_parent(tree):
    """Tokens from the root's child down to each proposed node of row 0."""
    tokens, parent = tree.tokens[0].tolist(), tree.parent[0].tolist()
    paths = {0: ()}
    for node in range(1, len(tokens)):
        if parent[node] >= 0:
            paths[node] = (*paths[parent[node]], tokens[node])
    return [paths[node] for node in paths if node > 0]


def ancestors(tree):
    """The nodes of row 0 that each node may attend to."""
    words = tree.ancestors[0].tolist()
    nodes = range(len(words))
    return [{above for above in nodes if words[node][above // 32] >> above % 32 & 1} for node in nodes]


def paths_by_ancestors(tree, nodes):
    """Tokens of row 0 that each of the nodes may attend to, the node itself the last."""
    tokens, sees = tree.tokens[0].tolist(), ancestors(tree)
    return [tuple(tokens[above] for above in sorted(sees[node])) for node in nodes]


def window_nodes(drafter):
    """Nodes of the window, the root left out."""
    return range(1, drafter.window * (drafter.level - 1))


def compare_with_literal(model, prompt, max_new_tokens, chosen):
    """Returns how many tokens each step emitted."""
    emitted, num_emitted, steps = decode_literally(model, prompt.tolist(), max_new_tokens, **chosen)
    drafter = Recording(**chosen)
    result = Decoder(model, drafter).decode([prompt], max_new_tokens)
    assert result.tokens == [emitted]
    assert result.stats.num_emitted == [num_emitted]
    assert len(drafter.trees) == len(steps)
    every_node, in_window = range(drafter.shape.num_nodes), window_nodes(drafter)
    for tree, (rows, proposed) in zip(drafter.trees, steps, strict=True):
        # equal beginnings of guesses are one node
        beginnings = {guess[: depth + 1] for guess in proposed for depth in range(len(guess))}
        assert sorted(paths_by_parent(tree)) == sorted(beginnings)
        sees = ancestors(tree)
        assert all(
            sees[node] == {*sees[above], node} for node, above in enumerate(tree.parent[0].tolist()) if above >= 0
        )
        assert tree.deepest.tolist() == [max(map(len, beginnings), default=0)]
        cells = [
            (*rows[0][: column + 1], *(row[column] for row in rows[1:depth]))
            for column in range(chosen["window"])
            for depth in range(1, chosen["level"])
            if (column, depth) != (0, 1)  # the root
        ]
        assert sorted(paths_by_ancestors(tree, in_window)) == sorted(cells)
        assert set(tree.parent[0, in_window].tolist()) <= {-1}
        assert tree.depth[0].tolist() == [len(path) - 1 for path in paths_by_ancestors(tree, every_node)]
    return num_emitted


@torch.no_grad()
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
def test_every_step_is_that_of_the_literal_algorithm(chosen, generator):
    (prompt,) = random_prompts(generator, [9])
    assert max(compare_with_literal(build_model("llama"), prompt, 60, chosen)) > 1


@torch.no_grad()
def test_repetition_is_accepted_step_by_step_as_the_literal_algorithm_does():
    model, tokenizer = load_tiny()
    prompt = torch.tensor(tokenizer(REPETITIVE)["input_ids"])
    num_emitted = compare_with_literal(model, prompt, 30, SETTINGS["paper"])
    assert sum(num_emitted) / len(num_emitted) > 1.3
    assert max(num_emitted) == 5, "no whole guess was accepted"


@pytest.mark.parametrize("family", ["llama", "opt", "mistral_window"])
def test_accepted_guesses_leave_the_text_as_it_is(family, generator):
    model = build_model(family)
    prompts = random_prompts(generator, [1, 4, 13])
    plain = Decoder(model).decode(prompts, 60).tokens
    chosen = {"level": 4, "window": 5, "guesses": 4}
    mended = Nudged(Recording(**chosen), plain, prompts)
    result = Decoder(model, mended).decode(prompts, 60)
    assert result.tokens == plain
    assert result.stats.tau > 1.3


def test_a_batch_is_its_rows_alone(generator):
    model = build_model("llama")
    prompts = random_prompts(generator, [1, 4, 13])
    drafter = Recording(level=4, window=5, guesses=4)
    together = Decoder(model, drafter).decode(prompts, 50)
    trees = [*drafter.trees]
    assert max(max(row) for row in together.stats.num_emitted) > 1
    for row, prompt in enumerate(prompts):
        alone = Decoder(model, drafter).decode([prompt], 50)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.stats.num_emitted[0] == together.stats.num_emitted[row]
        for tree, mine in zip(trees, drafter.trees, strict=False):  # other rows may take more steps
            assert tree.tokens[row].tolist() == mine.tokens[0].tolist()
            assert tree.parent[row].tolist() == mine.parent[0].tolist()
            assert tree.deepest[row] == mine.deepest[0]


def test_rows_end_at_stop_tokens_and_at_the_end_of_the_context(generator):
    model = build_model("opt")  # learned positions: one past the last would raise
    room = model.config.max_position_embeddings
    prompts = random_prompts(generator, [room - 30, room - 50])
    plain = Decoder(model).decode(prompts, 30).tokens
    assert Decoder(model, Lookahead()).decode(prompts, 30).tokens == plain
    stop = plain[0][7]
    expected = Decoder(model).decode(prompts, 30, stop_tokens=[stop]).tokens
    assert Decoder(model, Lookahead()).decode(prompts, 30, stop_tokens=[stop]).tokens == expected


@pytest.mark.interpreter
def test_the_triton_kernels_cope_with_the_window(generator):
    model = build_model("llama")
    prompts = random_prompts(generator, [5, 3])
    chosen = {"level": 3, "window": 2, "guesses": 2}
    expected = Decoder(model, Lookahead(**chosen)).decode(prompts, 6)
    result = Decoder(model, Lookahead(**chosen), backend="triton").decode(prompts, 6)
    assert result.tokens == expected.tokens
    assert result.stats.num_emitted == expected.stats.num_emitted


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_the_pool_is_a_least_recently_used_list_per_first_token(data):
    level, guesses = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    chunk, num_chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    batch_size, tokens = data.draw(st.integers(1, 2)), st.integers(0, 1)
    pool = NgramPool(batch_size, capacity=max(chunk * num_chunks, guesses), level=level, device=torch.device("cpu"))
    lists = [{0: [], 1: []} for _ in range(batch_size)]
    ngram = st.lists(tokens, min_size=level, max_size=level)
    for _ in range(num_chunks):
        added = data.draw(
            st.lists(st.lists(ngram, min_size=chunk, max_size=chunk), min_size=batch_size, max_size=batch_size)
        )
        pool.add(torch.tensor(added, dtype=torch.int32))
        for kept, row in zip(lists, added, strict=True):
            for first, *rest in row:
                kept[first] = [other for other in kept[first] if other != rest] + [rest]
                kept[first] = kept[first][-guesses:]
        for first in (0, 1):
            found, is_known = pool.newest(torch.full((batch_size,), first), guesses)
            for row in range(batch_size):
                count = len(lists[row][first])
                assert is_known[row].tolist() == [True] * count + [False] * (guesses - count)
                assert found[row, :count].tolist() == lists[row][first][::-1]
                assert not found[row, count:].any()


def test_a_full_pool_forgets_what_was_seen_longest_ago():
    pool = NgramPool(1, capacity=3, level=2, device=torch.device("cpu"))

    def add(*ngrams):
        pool.add(torch.tensor([ngrams], dtype=torch.int32))
        found, is_known = pool.newest(torch.tensor([5]), 3)
        return found[0, :, 0][is_known[0]].tolist()

    assert add((5, 1), (5, 2)) == [2, 1]
    assert add((-1, -1), (5, 3)) == [3, 2]
    assert add((5, 2)) == [2, 3]  # seen again: the older place is free, and is not written before its turn
    assert add((5, 4), (6, 4)) == [4, 2]


def test_the_pool_of_a_long_text_keeps_the_last_steps_only(generator, monkeypatch):
    model = build_model("llama")
    prompts = random_prompts(generator, [6])
    whole = Decoder(model, Lookahead(level=3)).decode(prompts, 60)
    monkeypatch.setattr(lookahead, "KEPT_STEPS", 2)
    short = Decoder(model, Lookahead(level=3)).decode(prompts, 60)
    assert short.tokens == whole.tokens
    assert sum(short.stats.deepest[0]) < sum(whole.stats.deepest[0])


@pytest.mark.parametrize(("name", "least"), [("level", 2), ("window", 1), ("guesses", 1)])
def test_rejects_settings_that_are_too_small(name, least):
    with pytest.raises(ValueError, match=f"^{name}: expected at least {least}, got {least - 1}$"):
        Lookahead(**{name: least - 1})


def test_rejects_more_nodes_than_a_tree_may_have():
    assert Lookahead(level=9, window=32, guesses=32).shape.num_nodes == 512
    with pytest.raises(ValueError, match=r"^level, window, guesses: expected .* of at most 512, got 520$"):
        Lookahead(level=9, window=33, guesses=32)
