"""specdec.trees.shape.TreeShape.preset: every published tree, node for node."""

import json
import re
import zlib
from pathlib import Path

import pytest

import specdec.trees.shape
from specdec.trees.shape import TreeShape, as_tree_shape, preset_names

# Counted from the authors' published node lists, duplicates removed: nodes per depth (root excluded), leaves, and the
# CRC-32 of the sorted rank paths written "0 1 0.0 ...".
PUBLISHED = {
    "medusa/mc_sim_7b_63": ((10, 28, 23, 2), 42, 0x0222B7B8),
    "hydra/mc_sim_7b_63": ((10, 28, 23, 2), 42, 0x0222B7B8),
    "medusa/vicuna_7b_stage2": ((10, 23, 23, 7), 42, 0xC0E5E3EE),
    "medusa/vicuna_7b_stage1_ablation": ((10, 21, 25, 7), 42, 0x84C80434),
    "medusa/vicuna_7b_stage1": ((10, 32, 20, 1), 44, 0x9AF769F6),
    "medusa/vicuna_13b_stage2": ((10, 19, 25, 9), 42, 0x5B25786E),
    "medusa/vicuna_13b_stage1": ((10, 29, 23, 1), 44, 0x9609B879),
    "medusa/vicuna_33b_stage2": ((10, 24, 24, 5), 43, 0x9C4D60D7),
    "medusa/vicuna_33b_stage1": ((10, 34, 19), 46, 0xB51FCD1C),
    "medusa/zephyr_stage2": ((10, 27, 23, 3), 44, 0xA4DDD5C9),
    "eagle/mc_sim_7b_63": ((4, 8, 8, 3, 2), 15, 0xFA017A6D),
    "falcon/kmask2_8layer_tree": ((20, 15, 19, 23, 21, 23, 21, 23), 91, 0xE9603BB6),
    "falcon/kmask2_8layer_tree_1": ((17, 15, 19, 23, 21, 23, 21, 21), 86, 0x68EF7766),
    "falcon/kmask2_8layer_tree_2": ((20, 18, 19, 15, 16, 10, 10, 9), 74, 0x4FCAFEB4),
    "falcon/kmask2_8layer_tree_3": ((20, 19, 19, 15, 16, 10, 10, 9), 75, 0xC86A032F),
    "falcon/kmask2_8layer_tree_4": ((20, 20, 19, 15, 16, 10, 10, 9), 76, 0x0EE0BE74),
    "falcon/kmask2_8layer_tree_5": ((20, 19, 19, 15, 14, 10, 10, 9), 73, 0x32285880),
    "falcon/kmask2_8layer_tree_6": ((20, 19, 19, 15, 14, 10, 10, 9), 73, 0x32285880),
    "falcon/kmask2_8layer_tree_7": ((20, 19, 21, 15, 14, 10, 10, 9), 75, 0xFAAD3AF4),
    "falcon/kmask2_6layer_tree_complex_2": ((4, 9, 18, 22, 11, 14, 11, 11), 36, 0xDC46CF7C),
    "falcon/kmask2_4layer_tree": ((20, 19, 21, 15), 60, 0x0A7C858D),
}
DRAFT_TOKENS = {
    "medusa": [63] * 9,
    "hydra": [63],
    "eagle": [25],
    "falcon": [75, 100, 165, 160, 117, 118, 119, 116, 116, 118],
}


def test_preset_names_are_those_published():
    assert preset_names() == tuple(sorted(PUBLISHED))
    for system, counts in DRAFT_TOKENS.items():
        found = [TreeShape.preset(name).num_draft_tokens for name in PUBLISHED if name.startswith(f"{system}/")]
        assert sorted(found) == sorted(counts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_counts_and_nodes(name):
    tree = TreeShape.preset(name)
    per_depth, num_leaves, checksum = PUBLISHED[name]
    assert tree.num_nodes_per_depth == (1, *per_depth)
    assert tree.num_draft_tokens == sum(per_depth)
    assert tree.num_leaves == num_leaves
    assert TreeShape.from_json(tree.to_json()) == tree
    nodes = " ".join(".".join(map(str, path)) for path in tree.rank_paths[1:])
    assert zlib.crc32(nodes.encode()) == checksum


def test_medusa_tree_has_the_published_node_order():
    counts = [((), 10), ((0,), 10), ((1,), 7), ((2,), 3), ((3,), 2)]
    counts += [((rank,), 1) for rank in range(4, 10)]
    counts += [((0, 0), 10), ((0, 1), 3), ((0, 2), 2)]
    counts += [((0, rank), 1) for rank in range(3, 8)]
    counts += [((1, 0), 2), ((2, 0), 1), ((0, 0, 0), 2)]
    expected = [(*path, rank) for path, count in counts for rank in range(count)]
    assert TreeShape.preset("medusa/mc_sim_7b_63").rank_paths == ((), *expected)


def test_medusa_tree_has_the_published_leaf_paths():
    paths = TreeShape.preset("medusa/mc_sim_7b_63").paths.tolist()
    assert paths[:3] == [[0, 1, 11, 39, 62], [0, 1, 11, 39, 63], [0, 1, 11, 40, -1]]
    # Medusa lists the leaves from the last node down
    assert sorted(paths, key=max, reverse=True)[:4] == [
        [0, 1, 11, 39, 63],
        [0, 1, 11, 39, 62],
        [0, 3, 28, 61, -1],
        [0, 2, 21, 60, -1],
    ]


def test_eagle_tree_is_not_the_medusa_tree_of_that_name():
    expected = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    tree = TreeShape.preset("eagle/mc_sim_7b_63")
    assert ["".join(map(str, path)) for path in tree.rank_paths[1:]] == expected.split()


def test_falcon_tree_keeps_its_gap_in_the_ranks():
    for number in range(2, 7):
        tree = TreeShape.preset(f"falcon/kmask2_8layer_tree_{number}")
        assert [path[2] for path in tree.rank_paths if path[:2] == (0, 1) and len(path) == 3] == [0, *range(3, 10)]
    assert TreeShape.preset("falcon/kmask2_8layer_tree").max_rank == 19


def test_a_tree_under_two_names_is_stored_once():
    assert TreeShape.preset("hydra/mc_sim_7b_63") is TreeShape.preset("medusa/mc_sim_7b_63")
    assert TreeShape.preset("falcon/kmask2_8layer_tree_6") is TreeShape.preset("falcon/kmask2_8layer_tree_5")


def test_preset_files_are_canonical_and_name_their_source():
    for path in sorted(Path(specdec.trees.shape.__file__).with_name("presets").glob("*.json")):
        data = json.loads(path.read_text())
        assert set(data) == {"version", "source", "trees"}, path.name
        assert data["version"] == 1
        assert re.search(r"arXiv:\d{4}\.\d{5}.*github\.com/", data["source"])
        children = list(data["trees"].values())
        assert all(children.count(one) == 1 for one in children), path.name
        for name, one in data["trees"].items():
            written = TreeShape.preset(f"{path.stem}/{name}").to_dict()["children"]
            assert list(written.items()) == list(one.items()), name


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("mc_sim_7b_63", "eagle/mc_sim_7b_63 or hydra/mc_sim_7b_63 or medusa/mc_sim_7b_63"),
        ("falcon/kmask2_4layer", "falcon/kmask2_4layer_tree"),
        ("medusa/mc_sim_7b", "medusa/mc_sim_7b_63"),
    ],
)
@pytest.mark.parametrize("read", [TreeShape.preset, as_tree_shape])
def test_unknown_preset_suggests_the_closest(read, name, suggested):
    with pytest.raises(ValueError, match=f"tree: expected .*got '{name}'; did you mean .*{suggested}"):
        read(name)


def test_unknown_preset_unlike_any_says_where_they_are_listed():
    with pytest.raises(ValueError, match=r"got '%%%'; specdec\.trees\.preset_names\(\) lists the presets"):
        TreeShape.preset("%%%")
