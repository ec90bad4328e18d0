"""Shapes of draft trees: derived arrays against hand-written and published values, text forms, presets, bad input."""

import copy
import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.trees.shape import MAX_NODES, TreeShape, as_tree_shape

# A tree of five nodes, by hand: 0 -> 1 (rank 0), 2 (rank 3); 1 -> 3 (rank 0), 4 (rank 1)
FIVE = TreeShape(parent=(-1, 0, 0, 1, 1), rank=(-1, 0, 3, 0, 1))


@st.composite
def rank_paths(draw) -> list[tuple[int, ...]]:
    """Rank paths of some tree of up to 70 nodes, in any order."""
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 70))):
        path = (*nodes[draw(st.integers(0, len(nodes) - 1))], draw(st.integers(0, 12)))
        if path not in nodes:
            nodes.append(path)
    return draw(st.permutations(nodes[1:]))


def unpack(words: np.ndarray, num_nodes: int) -> list[list[bool]]:
    """Bits of the words by plain integer arithmetic."""
    unsigned = [[int(word) % 2**32 for word in row] for row in words]
    return [[bool(row[j // 32] >> (j % 32) & 1) for j in range(num_nodes)] for row in unsigned]


def test_sizes_of_a_hand_written_tree():
    assert (FIVE.num_nodes, FIVE.num_draft_tokens, FIVE.num_leaves) == (5, 4, 3)
    assert (FIVE.max_depth, FIVE.max_rank) == (2, 3)
    assert FIVE.num_nodes_per_depth == (1, 2, 2)
    assert FIVE.levels == (range(1), range(1, 3), range(3, 5))
    assert [list(nodes) for nodes in FIVE.children] == [[1, 2], [3, 4], [], [], []]
    assert FIVE.rank_paths == ((), (0,), (3,), (0, 0), (0, 1))


def test_arrays_of_a_hand_written_tree():
    assert FIVE.depth.tolist() == [0, 1, 1, 2, 2]
    assert FIVE.paths.tolist() == [[0, 1, 3], [0, 1, 4], [0, 2, -1]]
    assert FIVE.ancestors.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert FIVE.ancestor_words.tolist() == [[0b1], [0b11], [0b101], [0b1011], [0b10011]]


def test_the_root_alone_is_a_tree():
    root = TreeShape.none()
    assert root == TreeShape.chain(0) == TreeShape.from_paths([]) == TreeShape.from_k_config(())
    assert (root.num_nodes, root.num_draft_tokens, root.num_leaves, root.max_depth, root.max_rank) == (1, 0, 1, 0, -1)
    assert root.num_nodes_per_depth == (1,)
    assert root.paths.tolist() == [[0]]
    assert root.depth.tolist() == [0]
    assert root.ancestor_words.tolist() == [[1]]
    assert TreeShape.from_json(root.to_json()) == root


@pytest.mark.parametrize("num_nodes", [31, 32, 33, 64, 65, MAX_NODES])
def test_words_of_a_chain_fill_up_bit_by_bit(num_nodes):
    chain = TreeShape.chain(num_nodes - 1)
    words = chain.ancestor_words
    assert words.dtype == np.int32
    assert words.shape == (num_nodes, -(-num_nodes // 32))
    for node in range(num_nodes):
        full, bits = divmod(node + 1, 32)
        # two's complement: 32 ones are -1, and 31 ones the largest int32
        expected = [-1] * full + [2**bits - 1] + [0] * words.shape[1]
        assert words[node].tolist() == expected[: words.shape[1]]


def test_bit_31_alone_is_the_sign():
    star = TreeShape.from_k_config((32,))
    assert star.ancestor_words[31].tolist() == [1 - 2**31, 0]
    assert star.ancestor_words[32].tolist() == [1, 1]


def test_arrays_are_int32_computed_once_and_read_only():
    for name in ("depth", "paths", "ancestor_words", "ancestors"):
        array = getattr(FIVE, name)
        assert array.dtype == (np.bool_ if name == "ancestors" else np.int32)
        assert array is getattr(FIVE, name)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@settings(deadline=None, max_examples=25)
@given(rank_paths())
def test_every_tree_survives_each_text_form_and_has_sound_arrays(paths):
    tree = TreeShape.from_paths(paths)
    assert tree.rank_paths == ((), *sorted(paths, key=lambda path: (len(path), path)))
    assert TreeShape.from_paths(tree.rank_paths[1:]) == tree
    assert TreeShape.from_json(tree.to_json()) == tree
    assert TreeShape.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree

    eye = np.eye(tree.num_nodes, dtype=bool)
    assert tree.ancestors[0].tolist() == eye[0].tolist()
    for node in range(1, tree.num_nodes):
        assert tree.ancestors[node].tolist() == (tree.ancestors[tree.parent[node]] | eye[node]).tolist()
    assert unpack(tree.ancestor_words, tree.num_nodes) == tree.ancestors.tolist()
    assert tree.depth.tolist() == [len(path) for path in tree.rank_paths] == (tree.ancestors.sum(1) - 1).tolist()

    rows = [[node for node in row if node >= 0] for row in tree.paths.tolist()]
    assert rows == sorted(rows)
    assert sorted(row[-1] for row in rows) == [node for node in range(tree.num_nodes) if node not in tree.parent]
    for row in rows:
        assert row == np.flatnonzero(tree.ancestors[row[-1]]).tolist()

    for node, nodes in enumerate(tree.children):
        assert list(nodes) == [child for child in range(1, tree.num_nodes) if tree.parent[child] == node]
    for depth, level in enumerate(tree.levels):
        assert list(level) == np.flatnonzero(tree.depth == depth).tolist()


def test_k_config_gives_every_node_of_a_depth_its_children():
    tree = TreeShape.from_k_config((4, 2, 2))
    assert tree.num_nodes_per_depth == (1, 4, 8, 16)
    paths = [(a, b, c) for a in range(4) for b in range(2) for c in range(2)]
    assert tree == TreeShape.from_paths({path[:depth] for path in paths for depth in (1, 2, 3)})
    assert TreeShape.from_k_config([1] * 7) == TreeShape.chain(7)


def test_the_largest_trees_are_accepted():
    assert TreeShape.chain(MAX_NODES - 1).num_nodes == MAX_NODES
    assert TreeShape.from_k_config((MAX_NODES - 1,)).num_nodes == MAX_NODES
    assert TreeShape.from_k_config((7, 8, 8)).num_nodes == MAX_NODES
    comb = TreeShape.from_paths([(0,) * d + (r,) for d in range(255) for r in (0, 1)])
    assert TreeShape.from_json(comb.to_json()) == comb
    assert comb.draw().count("\n") == 47


def test_equal_trees_are_one_dictionary_key():
    tree = TreeShape.from_paths([[1], [0, 0], [0]])
    other = TreeShape(parent=[-1, 0, 0, 1], rank=np.array([-1, 0, 1, 0]))
    assert tree == other
    assert {tree: "graph"}[other] == "graph"
    assert {type(value) for value in other.rank} == {int}
    assert tree != TreeShape.from_paths([[1], [1, 0], [0]])
    assert tree != TreeShape.from_paths([[2], [0, 0], [0]])


def test_copies_and_pickles_are_equal_and_still_read_only():
    FIVE.ancestors
    for other in (copy.deepcopy(FIVE), pickle.loads(pickle.dumps(FIVE))):
        assert other == FIVE
        assert not other.ancestors.flags.writeable


# Whatever a `tree` argument accepts


def test_every_accepted_form_becomes_a_tree_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FIVE.save("five.json")
    FIVE.save("five.tree")
    assert as_tree_shape(FIVE) is FIVE
    for form in ("five.json", "five.tree", str(tmp_path / "five.json"), tmp_path / "five.json"):
        assert as_tree_shape(form) == FIVE
    assert as_tree_shape("eagle/mc_sim_7b_63").num_draft_tokens == 25
    assert as_tree_shape((4, 2, 2)) == as_tree_shape([4, 2, 2]) == TreeShape.from_k_config((4, 2, 2))
    assert as_tree_shape(5) == as_tree_shape(np.int64(5)) == TreeShape.chain(5)
    assert as_tree_shape(0) == TreeShape.none()
    assert type(as_tree_shape(tuple(np.array([2, 2]))).parent[1]) is int


@pytest.mark.parametrize("tree", [None, 2.0, True, b"x.json", {"root": 2}, [[0], [0, 0]], (2, 2.0), (2, True), {2}])
def test_anything_else_is_refused_with_what_is_accepted(tree):
    accepted = "TreeShape, the name of a preset, the path of a JSON file, a k_config such as \\(4, 2, 2\\)"
    with pytest.raises(TypeError, match=f"tree: expected a {accepted}.*got {type(tree).__name__}"):
        as_tree_shape(tree)


def test_a_list_of_paths_is_pointed_to_its_constructor():
    with pytest.raises(TypeError, match="from_paths"):
        as_tree_shape([[0], [1]])


def test_a_missing_file_is_named(tmp_path):
    for form in ("no_such_tree.json", tmp_path / "no_such_tree"):
        with pytest.raises(FileNotFoundError, match="no_such_tree"):
            as_tree_shape(form)


# Bad input


@pytest.mark.parametrize(
    ("parent", "rank", "message"),
    [
        ((), (), "parent: expected 1 to 512 nodes, root included, got 0"),
        ((-1, *[0] * 512), (-1, *range(512)), "parent: expected 1 to 512 nodes, root included, got 513"),
        ((-1, 0), (-1,), "rank: expected 2 entries, one per entry of parent, got 1"),
        ((0, 0), (-1, 0), "parent: expected -1 for node 0, the root, got 0"),
        ((-1, 0), (0, 0), "rank: expected -1 for node 0, the root, got 0"),
        ((-1, 1), (-1, 0), "parent: expected 0 to 0 for node 1, got 1"),
        ((-1, 2, 0), (-1, 0, 0), "parent: expected 0 to 0 for node 1, got 2"),
        ((-1, -1), (-1, 0), "parent: expected 0 to 0 for node 1, got -1"),
        ((-1, 0, 1, 0), (-1, 0, 0, 1), "parent: expected nodes in order .* got parent 0 of node 3 after parent 1"),
        ((-1, 0), (-1, -1), "rank: expected 0 to 2147483647 for node 1, got -1"),
        ((-1, 0), (-1, 2**31), "rank: expected 0 to 2147483647 for node 1, got 2147483648"),
        ((-1, 0, 0), (-1, 4, 4), "rank: expected distinct ascending ranks among the children of node 0, got 4 after 4"),
        ((-1, 0, 0), (-1, 1, 0), "rank: expected distinct ascending ranks among the children of node 0, got 0 after 1"),
    ],
)
def test_a_shape_that_is_no_ordered_tree_is_refused(parent, rank, message):
    with pytest.raises(ValueError, match=message):
        TreeShape(parent, rank)


@pytest.mark.parametrize(
    ("parent", "rank", "message"),
    [
        (3, (-1,), "parent: expected a sequence of ints, got int"),
        ("0", (-1,), "parent: expected a sequence of ints, got str"),
        ((-1, 0), (-1, 0.0), r"rank\[1\]: expected an int, got float"),
        ((-1, False), (-1, 0), r"parent\[1\]: expected an int, got bool"),
    ],
)
def test_a_shape_of_other_types_is_refused(parent, rank, message):
    with pytest.raises(TypeError, match=message):
        TreeShape(parent, rank)


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ([[0], [1, 0]], ValueError, r"paths: expected the parent of every path, got \[1, 0\] without \[1\]"),
        ([[0, 0]], ValueError, r"got \[0, 0\] without \[0\]"),
        ([[0], [1], [0]], ValueError, r"paths\[2\]: expected every path once, got \[0\] again"),
        ([[0], []], ValueError, r"paths\[1\]: expected at least one rank \(the root is not listed\)"),
        ([[0], [-1]], ValueError, r"paths\[1\]: expected ranks from 0 to 2147483647, got \[-1\]"),
        ([[2**31]], ValueError, r"paths\[0\]: expected ranks from 0 to 2147483647, got \[2147483648\]"),
        ([[rank] for rank in range(512)], ValueError, "paths: expected at most 511 paths, got more"),
        ([0, 1], TypeError, r"paths\[0\]: expected a sequence of ints, got int"),
        ("01", TypeError, r"paths\[0\]: expected a sequence of ints, got str"),
        ([[0.5]], TypeError, r"paths\[0\]\[0\]: expected an int, got float"),
        (7, TypeError, "paths: expected a list of rank paths, got int"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths, error, message):
    with pytest.raises(error, match=message):
        TreeShape.from_paths(paths)


def test_duplicates_are_dropped_on_request():
    paths = [[0], [0, 1], [1], [0, 1], [0]]
    tree = TreeShape.from_paths(paths, drop_duplicates=True)
    assert tree.rank_paths == ((), (0,), (1,), (0, 1))


@pytest.mark.parametrize(
    ("k_config", "error", "message"),
    [
        ((4, 0), ValueError, "k_config: expected at least 1 child per node, got 0 at depth 1"),
        ((-2,), ValueError, "k_config: expected at least 1 child per node, got -2 at depth 0"),
        ((512,), ValueError, "k_config: expected at most 512 nodes, root included, got more: \\(512,\\)"),
        ((8, 8, 8), ValueError, "k_config: expected at most 512 nodes"),
        ((10**30, 10**30), ValueError, "k_config: expected at most 512 nodes"),
        ((2.5,), TypeError, r"k_config\[0\]: expected an int, got float"),
        (3, TypeError, "k_config: expected a sequence of ints, got int"),
    ],
)
def test_a_bad_k_config_is_refused(k_config, error, message):
    with pytest.raises(error, match=message):
        TreeShape.from_k_config(k_config)


@pytest.mark.parametrize("length", [-1, 512])
def test_a_chain_of_impossible_length_is_refused(length):
    with pytest.raises(ValueError, match=f"num_draft_tokens: expected 0 to 511, got {length}"):
        TreeShape.chain(length)


def test_a_chain_of_no_int_is_refused():
    with pytest.raises(TypeError, match="num_draft_tokens: expected an int, got float"):
        TreeShape.chain(3.0)


# Files


def test_saved_file_is_readable_text(tmp_path):
    FIVE.save(tmp_path / "new" / "five.json")
    text = (tmp_path / "new" / "five.json").read_text()
    assert text == '{\n  "version": 1,\n  "children": {\n    "root": [0, 3],\n    "0": 2\n  }\n}\n'
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["five.json"]


def test_children_may_be_listed_in_any_order():
    text = '{"children": {"0.1": [3, 0], "0": 2, "root": 1}, "version": 1}'
    assert TreeShape.from_json(text).rank_paths == ((), (0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 3))


MALFORMED = [
    ("", "expected JSON"),
    ("{", "expected JSON"),
    (b"\xff\xfe\xfa", "expected JSON"),
    ("[" * 100_000, "expected JSON"),
    ("9" * 5_000, "expected (a )?JSON"),
    ('{"version": 1, "children": {"root": 1, "root": 2}}', "expected JSON, got an error: 'root' is given twice"),
    ("[]", "expected a JSON object, got list"),
    ("null", "expected a JSON object, got NoneType"),
    ('{"version": 1, "children": {}, "depth": 3}', "expected the keys .* got the unknown key 'depth'"),
    ('{"version": 1}', "got none called 'children'"),
    ('{"children": {}}', "got none called 'version'"),
    ('{"version": 2, "children": {}}', "version: expected 1, got 2"),
    ('{"version": true, "children": {}}', "version: expected 1, got True"),
    ('{"version": "1", "children": {}}', "version: expected 1, got '1'"),
    ('{"version": 1, "children": [1]}', "children: expected a JSON object, got list"),
]
MALFORMED_CHILDREN = [
    ('{"0": 1}', r"children\.0: expected a node of the tree as key, but no other entry has it as a child"),
    ('{"root": 2, "0.0": 1}', r"children\.0\.0: expected a node of the tree as key"),
    ('{"root": 2, "2": 1}', r"children\.2: expected a node of the tree as key"),
    ('{"root": 2, "00": 1}', "expected \"root\" or a rank path .* got '00'"),
    ('{"root": 2, "-1": 1}', 'expected "root" or a rank path'),
    ('{"root": 2, "0.": 1}', 'expected "root" or a rank path'),
    ('{"root": 2, "": 1}', 'expected "root" or a rank path'),
    ('{"root": 2, "1\\n": 1}', 'expected "root" or a rank path'),
    ('{"root": 0}', r"children\.root: expected the number of children, 1 to 511, or a list of their ranks, got 0"),
    ('{"root": 512}', r"children\.root: expected the number of children, 1 to 511.* got 512"),
    ('{"root": 1' + "0" * 30 + "}", r"children\.root: expected the number of children"),
    ('{"root": -3}', r"children\.root: expected the number of children"),
    ('{"root": 2.0}', r"children\.root: expected the number of children.* got 2.0"),
    ('{"root": true}', r"children\.root: expected the number of children.* got True"),
    ('{"root": "2"}', r"children\.root: expected the number of children.* got '2'"),
    ('{"root": null}', r"children\.root: expected the number of children"),
    ('{"root": {}}', r"children\.root: expected the number of children"),
    ('{"root": []}', r"children\.root: expected the number of children"),
    ('{"root": [0, -1]}', r"children\.root: expected the number of children"),
    ('{"root": [0, 2147483648]}', r"children\.root: expected the number of children"),
    ('{"root": [0, [1]]}', r"children\.root: expected the number of children"),
    ('{"root": [1, 1]}', r"children\.root: expected distinct ranks, got \[1, 1\]"),
    ('{"root": 300, "0": 300}', r"children\.0: expected at most 512 nodes in all, root included, got more"),
]
MALFORMED += [(f'{{"version": 1, "children": {text}}}', message) for text, message in MALFORMED_CHILDREN]


@pytest.mark.parametrize(("content", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_refused_by_name_and_field(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: .*{message}"):
        TreeShape.load(path)


def test_bad_data_names_its_source():
    with pytest.raises(ValueError, match=r"config\.json: tree: children: expected a JSON object, got int"):
        TreeShape.from_dict({"version": 1, "children": 5}, source="config.json: tree")
    with pytest.raises(ValueError, match=r'tree: children: expected "root" or a rank path .* got 3'):
        TreeShape.from_dict({"version": 1, "children": {3: 5}})


# For people


def test_repr_says_what_matters():
    assert repr(TreeShape.none()) == "TreeShape.none()"
    assert repr(TreeShape.chain(5)) == "TreeShape.chain(5)"
    assert repr(FIVE) == "<TreeShape: 4 draft tokens, 2/2 by depth, 3 leaves>"
    assert repr(TreeShape.from_paths([[1], [1, 0]])) == "<TreeShape: 2 draft tokens, 1/1 by depth, 1 leaves>"
    deep = TreeShape.from_paths([(0,) * depth + (1,) for depth in range(20)] + [(0,) * (d + 1) for d in range(20)])
    assert repr(deep) == f"<TreeShape: 40 draft tokens, {'/'.join(['2'] * 12)}/... by depth, 21 leaves>"


def test_picture_of_a_tree():
    tree = TreeShape.from_paths(
        [[0], [1], [2], [3], [5], [0, 0], [0, 1], [0, 0, 0], [0, 0, 2], [0, 0, 3], [1, 0], [1, 0, 0]]
    )
    assert tree.draw().splitlines() == [
        "root",
        "├─ 0",
        "│  ├─ 0 ─ 0, 2..3",
        "│  └─ 1",
        "├─ 1 ─ 0 ─ 0",
        "└─ 2..3, 5",
    ]
    assert TreeShape.none().draw() == "root"
    assert TreeShape.chain(2).draw().splitlines() == ["root", "└─ 0 ─ 0"]


def test_picture_is_cut_to_size():
    tree = TreeShape.preset("falcon/kmask2_8layer_tree")
    lines = tree.draw(max_lines=10, max_width=20).splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"... {len(tree.draw(max_lines=1000).splitlines()) - 9} more lines"
    assert max(map(len, lines)) <= 20
    chain = TreeShape.chain(500).draw(max_width=20)
    assert chain.splitlines()[1] == "└─ 0 ─ 0 ─ 0 ─ 0 ..."


def test_trees_need_no_torch():
    code = "import sys, specdec.trees.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
