"""What the tests of the acceptance kernels share: random trees, equality of verdicts and of laws."""

import torch

from lib.tensors import DEVICE, int32

# The interpreter takes milliseconds for a program; a GPU takes thousands of trees at once.
NUM_TREES = 4000 if torch.cuda.is_available() else 40
FIELDS = ("path", "num_accepted", "next_root", "emitted")


def assert_same(verdict, expected):
    for field in FIELDS:
        got, want = getattr(verdict, field), getattr(expected, field)
        assert got.dtype == torch.int32
        assert torch.equal(got, want), f"{field}: {got.tolist()} is not {want.tolist()}"


def random_parents(generator, num_nodes, *, rows=1, padding=0.1):
    """[rows, N] int32: random topological parents; a share of the nodes is padding."""
    parent = torch.full((rows, num_nodes), -1, dtype=torch.int32)
    for j in range(1, num_nodes):
        parent[:, j] = torch.randint(0, j, (rows,), generator=generator, dtype=torch.int32)
    return parent.masked_fill(torch.rand(rows, num_nodes, generator=generator) < padding, -1).to(DEVICE)


def random_logits(generator, *shape, common=4, dtype=torch.float32):
    """Logits that put most of their mass on the first `common` tokens, so that trees of these tokens get deep."""
    logits = 2 * torch.randn(*shape, generator=generator)
    logits[..., :common] += torch.tensor(shape[-1] + 8.0).log()
    return logits.to(dtype).to(DEVICE)


def random_limits(generator, batch, *, max_depth=4):
    """A budget of 0 to 5 tokens a row, and two stop tokens of which one is rare."""
    budget = torch.randint(0, 6, (batch,), generator=generator, dtype=torch.int32).to(DEVICE)
    return {"max_depth": max_depth, "budget": budget, "stop_tokens": int32([1, 77])}


def chi_square_p_value(counts, probs):
    """Probability of a deviation from `probs` at least as large; the rarest cells are joined until all expect five.

    A cell that expects a tenth and is met twice would make one right sample in sixty look like one in a thousand.
    """
    expected = probs.double() * counts.sum()
    order = expected.argsort()
    counts, expected = counts.double()[order], expected[order]
    cells, num_cells, held = [], 0, 0.0
    for one in expected.tolist():
        cells.append(num_cells)
        held += one
        if held >= 5:
            num_cells, held = num_cells + 1, 0.0
    assert num_cells > 1, "one cell tells nothing"
    cells = torch.tensor(cells).clamp(max=num_cells - 1)  # what is left over goes to the last
    counts, expected = (expected.new_zeros(num_cells).index_add(0, cells, one) for one in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, statistic / 2).item()


def assert_sample_has_law(tokens, probs):
    """One sample against its law; seeds are fixed, so a right op passes for good and 0.001 is no flake."""
    counts = torch.bincount(tokens.cpu().long(), minlength=len(probs))
    assert len(counts) == len(probs)
    assert not counts[probs.cpu() == 0].any(), "a token of probability 0 was emitted"
    p_value = chi_square_p_value(counts, probs.cpu())
    assert p_value > 1e-3, f"chi-square: p = {p_value:.2g}"


def cell_middles(probs):
    """Per token the middle of its cell of the distribution function, as a draw by its inverse has them."""
    upper = probs.double().cumsum(-1)
    return upper - probs.double() / 2


def draw_tokens(generator, parent, draft_logits, draft_row, replacement):
    """Tokens of the children of every node, drawn from the node's draft law."""
    probs = draft_logits.double().softmax(-1).cpu()
    batch, num_nodes = probs.shape[0], len(draft_row)
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int32)
    for b, row in enumerate(parent.expand(batch, -1).tolist()):
        for n in range(num_nodes):
            children = [j for j in range(num_nodes) if row[j] == n]
            if children and draft_row[n] >= 0:
                law = probs[b, draft_row[n]]
                tokens[b, children] = torch.multinomial(law, len(children), replacement, generator=generator).int()
    return tokens.to(DEVICE)


def traversal_tables(parent):
    """The tables of `accept_traversal`: nodes in post-order, padding first; and the nodes of each step."""
    children = [[j for j, above in enumerate(parent) if above == n] for n in range(len(parent))]
    order, step = [], {0: 0}

    def visit(node):
        for place, child in enumerate(children[node]):
            step[child] = step[node] + place + 1
            visit(child)
        order.append(node)

    visit(0)
    steps = [[node for node in step if step[node] == i] for i in range(1, max(step.values()) + 1)]
    width = max(map(len, steps), default=0)
    padding = [node for node in range(len(parent)) if node not in step]
    listed = [row + [-1] * (width - len(row)) for row in steps]
    return int32(padding + order), int32(listed).view(len(steps), width)
