"""Drafters that know the answer: one proposes the true continuation, one never a right token."""

import torch

from specdec.drafting.base import Drafter
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.trees.shape import TreeShape


class Scripted(Drafter):
    """Fills its tree from the known output of plain decoding.

    Args:
        shape: any tree.
        expected: per row, the tokens that plain decoding emits.
        vocab_size: of the target.
        right_nodes: nodes that carry the true token; none for a drafter that is always wrong.
    """

    kind = "scripted"

    def __init__(self, shape: TreeShape, expected: list[list[int]], vocab_size: int, right_nodes: list[int]) -> None:
        self.shape = shape
        self.expected = expected
        self.vocab_size = vocab_size
        self.right_nodes = set(right_nodes)

    def bind(self, target):
        self.template = TreeTemplate(self.shape, target.device)

    def start(self, prompt, output):
        self.num_done = torch.zeros_like(prompt.lengths)  # emitted tokens before the root

    def draft(self, root, choose):
        tokens = []
        for row, done in enumerate(self.num_done.tolist()):
            assert self.expected[row][done] == int(root[row])
            tokens.append([int(root[row])])
            for node in range(1, self.shape.num_nodes):
                index = done + int(self.shape.depth[node])
                true = self.expected[row][index] if index < len(self.expected[row]) else 0
                wrong = (true + 1 + node) % self.vocab_size
                tokens[-1].append(
                    true if node in self.right_nodes else wrong if wrong != true else (true + 1) % self.vocab_size
                )
        tokens = torch.tensor(tokens, dtype=torch.int32, device=root.device)
        template = self.template
        deepest = torch.full_like(root, self.shape.max_depth)
        return DraftTree(tokens, template.parent, template.depth, template.ancestors, deepest, self.shape.max_depth)

    def commit(self, verdict, output):
        self.num_done += verdict.num_emitted


def oracle(shape: TreeShape, expected: list[list[int]], vocab_size: int) -> Scripted:
    """Always right on the path to the last of the deepest leaves."""
    path = max(shape.paths.tolist(), key=lambda nodes: sum(node >= 0 for node in nodes))
    return Scripted(shape, expected, vocab_size, [node for node in path if node > 0])


def always_wrong(shape: TreeShape, expected: list[list[int]], vocab_size: int) -> Scripted:
    """Never right."""
    return Scripted(shape, expected, vocab_size, [])
