"""models.products: the same products, in whichever order; and layers that are their own again afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lib.families import build_model, random_prompts
from specdec.models.common import products
from specdec.models.common.products import few_rows_linear, with_few_rows
from specdec.models.target.target import Target

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the order of factors matters to MKL")


@pytest.fixture
def transposed(monkeypatch):
    """Sizes of the products that were computed with their rows transposed."""
    sizes, mm = [], torch.mm

    def seen(weight, rows):
        sizes.append((rows.shape[1], weight.shape[0]))
        return mm(weight, rows)

    monkeypatch.setattr(products.torch, "mm", seen)
    return sizes


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (11,), (1, 12), (2, 9), (3, 4, 10), (1, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_linear(shape, has_bias, generator):
    weight, bias = torch.randn(17, 8, generator=generator), torch.randn(17, generator=generator)
    x = torch.randn(*shape, 8, generator=generator)
    expected = F.linear(x, weight, bias if has_bias else None)
    got = few_rows_linear(x, weight, bias if has_bias else None)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected)  # of fp32: only the order of sums differs
    strided = torch.randn(8, *shape, generator=generator).movedim(0, -1)
    torch.testing.assert_close(few_rows_linear(strided, weight), F.linear(strided, weight))


@needs_mkl
def test_rows_are_transposed_from_so_many_on(transposed, monkeypatch):
    weight = torch.ones(4, 2)
    for rows in (1, 6, 11, 12, 40):
        few_rows_linear(torch.ones(1, rows, 2), weight)
    assert transposed == [(12, 4), (40, 4)]
    transposed.clear()
    monkeypatch.setattr(products, "CACHED_BYTES", weight.nbytes - 1)
    for rows in (5, 6, 12):
        few_rows_linear(torch.ones(1, rows, 2), weight)
    assert transposed == [(6, 4), (12, 4)]


@pytest.mark.parametrize("odd", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_other_weights_are_multiplied_as_ever(odd, transposed):
    few_rows_linear(torch.ones(1, 20, 8, **odd), torch.ones(4, 8, **odd))
    few_rows_linear(torch.ones(1, 20, 4), torch.ones(4, 8).t())
    assert not transposed


@needs_mkl
def test_a_hooked_target_has_them_until_the_block_ends(transposed, generator):
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
            logits = target.prefill(prompt[None], lengths, target.new_cache(1, 20)).logits
            assert len(transposed) == 7 * target.num_layers
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
