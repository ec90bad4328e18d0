"""Attention of prompts: who sees whom in each chunk, and what PyTorch is asked for, which decides a GPU's kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from specdec.models.common.passes import PromptPass

HEADS = {"own": 4, "grouped": 2}


def by_the_definition(query, keys, values, start, window):
    """In fp64, token by token."""
    query, keys, values = (value.double() for value in (query, keys, values))
    keys, values = (value.repeat_interleave(query.shape[1] // value.shape[1], 1) for value in (keys, values))
    rows = []
    for place in range(query.shape[2]):
        seen = slice(0 if window is None else max(0, start + place + 1 - window), start + place + 1)
        weights = (query[:, :, place, None] @ keys[:, :, seen].mT * 0.3).softmax(-1)
        rows.append((weights @ values[:, :, seen])[:, :, 0])
    return torch.stack(rows, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 4, 40])
@pytest.mark.parametrize("start", [0, 1, 9])
@pytest.mark.parametrize("num_kv_heads", HEADS.values(), ids=HEADS)
def test_every_token_sees_those_before_it(num_kv_heads, start, window, dtype, device, generator):
    query = torch.randn(2, 4, 6, 8, generator=generator).to(device, dtype)
    keys, values = torch.randn(2, 2, num_kv_heads, 20, 8, generator=generator).to(device, dtype)
    chunk = PromptPass(start, 6, 2, torch.device(device))
    attended = chunk.attend(query, keys, values, scale=0.3, window=window)
    expected = by_the_definition(query, keys, values, start, window)
    torch.testing.assert_close(attended.double(), expected, atol=1e-5 if dtype == torch.float32 else 4e-2, rtol=0)
    assert chunk.positions[1].tolist() == list(range(start, start + 6))


@pytest.mark.parametrize(
    ("start", "window", "dtype", "device", "wanted"),
    [
        (0, None, torch.bfloat16, "meta", ("causal", "grouped")),
        (0, 40, torch.bfloat16, "meta", ("causal", "grouped")),
        (9, None, torch.bfloat16, "meta", ("lower right", "grouped")),
        (0, None, torch.float32, "meta", ("causal", "own")),
        (9, None, torch.float32, "meta", ("lower right", "own")),
        (9, None, torch.float32, "cpu", ("lower right", "grouped")),
        (9, 4, torch.bfloat16, "meta", ([6, 9], "own")),
        (0, 4, torch.bfloat16, "meta", ([6, 6], "own")),
    ],
)
def test_no_kernel_that_plans_for_a_length_or_writes_weights_is_asked_for(
    start, window, dtype, device, wanted, monkeypatch
):
    asked = []

    def attention(query, keys, values, *, attn_mask, is_causal, scale, enable_gqa):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        kind = "causal" if is_causal else "lower right" if isinstance(attn_mask, CausalBias) else list(attn_mask.shape)
        assert enable_gqa == (keys.shape[1] < query.shape[1])
        asked.append((kind, "grouped" if enable_gqa else "own"))
        raise KeyError

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    query = torch.zeros(1, 4, 6, 8, dtype=dtype, device=device)
    keys = torch.zeros(1, 2, 20, 8, dtype=dtype, device=device)
    with pytest.raises(KeyError):
        PromptPass(start, 6, 1, torch.device(device)).attend(query, keys, keys, scale=0.3, window=window)
    assert asked == [wanted]
    assert torch.backends.cuda.cudnn_sdp_enabled(), "what was allowed before is allowed again"
