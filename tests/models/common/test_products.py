"""models.products: the same products, in whichever order; and layers that are their own again afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import specdec
from lib.families import build_model, random_prompts
from specdec.models.common import products
from specdec.models.common.products import few_rows_linear, with_few_rows
from specdec.models.target.target import Target

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the order of factors matters to MKL")

TRIALS = 2 * products._TRIES


@pytest.fixture
def are_tried(monkeypatch):
    """Both orders are tried, as they are not where the same bits are asked for."""
    monkeypatch.setattr(products, "_ORDERS", {})
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def transposed(monkeypatch, are_tried):
    """Sizes of the products that were computed with their rows transposed."""
    sizes, mm = [], torch.mm

    def seen(weight, rows):
        sizes.append((rows.shape[1], weight.shape[0]))
        return mm(weight, rows)

    monkeypatch.setattr(products.torch, "mm", seen)
    return sizes


@pytest.fixture
def takes(monkeypatch):
    """A clock by which products take the times that are put in here; 1 where there are none."""
    times, now = [], [0.0]

    def clock():
        now.append(now[-1] + (times.pop(0) if times and not len(now) % 2 else 1.0))
        return now[-1]

    monkeypatch.setattr(products, "perf_counter", clock)
    return times


@pytest.mark.parametrize("shape", [(1, 1), (3,), (1, 5), (11,), (1, 12), (2, 9), (3, 4, 10), (1, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_other", [False, True])
def test_products_are_those_of_linear(shape, has_bias, is_other, are_tried, generator, monkeypatch):
    monkeypatch.setattr(products, "_WORTH_IT", float("inf") if is_other else 0.0)
    weight, bias = torch.randn(17, 8, generator=generator), torch.randn(17, generator=generator)
    x = torch.randn(*shape, 8, generator=generator)
    expected = F.linear(x, weight, bias if has_bias else None)
    strided = torch.randn(8, *shape, generator=generator).movedim(0, -1)
    for _ in range(TRIALS + 1):
        got = few_rows_linear(x, weight, bias if has_bias else None)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected)  # of fp32: only the order of sums differs
        torch.testing.assert_close(few_rows_linear(strided, weight), F.linear(strided, weight))


@needs_mkl
@pytest.mark.parametrize(
    ("usual", "other", "is_other"), [(1.0, 0.9, True), (1.0, 0.99, False), (1.0, 1.1, False), (0.3, 0.1, True)]
)
def test_both_orders_are_tried_and_the_faster_one_stays(usual, other, is_other, transposed, takes):
    x, weight = torch.ones(5, 2), torch.ones(4, 2)
    takes += [usual, other] * products._TRIES
    takes[0:2] = other, usual  # the first ones do not count
    takes[4:6] = 9.0, 9.0  # nor does a disturbance
    for _ in range(TRIALS):
        few_rows_linear(x, weight)
    assert transposed == [(5, 4)] * products._TRIES
    transposed.clear()
    for _ in range(3):
        few_rows_linear(x, weight)
    assert transposed == [(5, 4)] * 3 * is_other


@needs_mkl
def test_every_size_has_an_order_of_its_own(transposed, takes, monkeypatch):
    decided, weight = torch.ones(5, 2), torch.ones(4, 2)
    takes += [2.0, 1.0] * products._TRIES
    for _ in range(TRIALS):
        few_rows_linear(decided, weight)
    transposed.clear()
    for x, other in ((torch.ones(6, 2), weight), (decided, torch.ones(3, 2)), (torch.ones(5, 4), torch.ones(4, 4))):
        few_rows_linear(x, other)
    assert not transposed
    few_rows_linear(torch.ones(1, 5, 2), weight)  # of as many rows
    assert transposed == [(5, 4)]
    monkeypatch.setattr(products.torch, "get_num_threads", lambda: 99)
    few_rows_linear(decided, weight)
    assert transposed == [(5, 4)]


@needs_mkl
def test_one_and_three_rows_are_filled_up_and_many_are_multiplied_as_ever(transposed):
    for _ in range(TRIALS + 1):
        few_rows_linear(torch.ones(products.MOST_ROWS + 1, 2), torch.ones(4, 2))
    assert not transposed
    for rows, filled in ((1, 2), (2, 2), (3, 4), (5, 5)):
        transposed.clear()
        for _ in range(TRIALS):
            assert few_rows_linear(torch.ones(rows, 2), torch.ones(4, 2)).shape == (rows, 4)
        assert transposed == [(filled, 4)] * products._TRIES


@pytest.mark.parametrize("odd", [{"dtype": torch.float64}, {"dtype": torch.float16}, {"device": "meta"}], ids=str)
def test_other_weights_are_multiplied_as_ever(odd, transposed):
    for _ in range(TRIALS + 1):
        few_rows_linear(torch.ones(1, 20, 8, **odd), torch.ones(4, 8, **odd))
        few_rows_linear(torch.ones(1, 20, 4), torch.ones(4, 8).t())
    assert not transposed


@needs_mkl
def test_nothing_is_tried_where_the_same_bits_are_asked_for(transposed):
    torch.use_deterministic_algorithms(True)
    for _ in range(TRIALS + 1):
        few_rows_linear(torch.ones(5, 2), torch.ones(4, 2))
    assert not transposed


@needs_mkl
def test_nothing_is_tried_where_processes_decode_together(transposed, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(TRIALS + 1):
        few_rows_linear(torch.ones(5, 2), torch.ones(4, 2))
    assert not transposed


@needs_mkl
@pytest.mark.parametrize("kind", ["medusa", "eagle", "draft_model"])
def test_greedy_text_is_that_of_transformers_while_orders_are_tried(kind, transposed):
    model, tokenizer = specdec.load_model("tiny")
    ids = tokenizer("Once upon a time there was a little girl", return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=60)
    transposed.clear()
    assert torch.equal(
        specdec.generate(model, specdec.load_drafter(f"tiny/{kind}", model), ids, max_new_tokens=60), expected
    )
    assert transposed


@needs_mkl
def test_a_hooked_target_has_them_until_the_block_ends(transposed, generator, monkeypatch):
    monkeypatch.setattr(products, "_WORTH_IT", float("inf"))
    model = build_model("llama")
    (prompt,) = random_prompts(generator, [20])
    target, lengths = Target(model), torch.tensor([20], dtype=torch.int32)
    before = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        expected = model(prompt[None]).logits[:, -1]
    assert not transposed
    for error in (None, KeyboardInterrupt):
        transposed.clear()
        with pytest.raises(error) if error else torch.no_grad(), torch.no_grad(), target.hooked():
            for _ in range(TRIALS):
                transposed.clear()
                logits = target.prefill(prompt[None], lengths, target.new_cache(1, 20)).logits
            assert sum(rows == 20 for rows, _ in transposed) == 7 * target.num_layers
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # fp32, through all layers
            if error:
                raise error
        assert [dict(vars(module)) for module in model.modules()] == before


def test_layers_with_a_forward_of_someone_else_keep_it():
    class Other(nn.Linear):
        pass

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Other(4, 4), nn.Linear(4, 4).double()]
    layers[1].forward = own = lambda x: x
    with with_few_rows(layers), with_few_rows(layers):
        is_suited = torch.backends.mkl.is_available()
        assert ["forward" in vars(layer) for layer in layers] == [is_suited, True, False, False]
        assert layers[1].forward is own
    assert ["forward" in vars(layer) for layer in layers] == [False, True, False, False]
