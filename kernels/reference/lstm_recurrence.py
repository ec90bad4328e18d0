"""Eager reference of kernels.lstm_recurrence: the definition, and what CPU decoding runs."""

import torch
import torch.nn.functional as F

__all__ = ["lstm_recurrence"]


def lstm_recurrence(
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    upcast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one LSTM layer along sequences whose inputs were multiplied already.

    Shapes, dtypes and meaning are those of `specdec.kernels.lstm_recurrence.lstm_recurrence`; arguments are not
    checked. Computed in float64 and rounded once; with `upcast=False` in the dtype of `given`, with the roundings of
    PyTorch's own operators.
    """
    batch, num_sequences, length, num_gates = given.shape
    width, dtype = num_gates // 4, torch.float64 if upcast else given.dtype
    start = given.new_zeros(batch, num_sequences, 2, width) if state is None else state
    hidden, cell = (start if source is None else start[:, source.long()]).to(dtype).unbind(2)
    # one of each row, or of none
    begin = given.new_zeros(1, dtype=torch.int64) if first is None else first[:, None, None]
    end = given.new_full((1,), length, dtype=torch.int64) if counts is None else counts[:, None, None]
    outputs = []
    for t in range(length):
        recurrent = F.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
        gates = given[:, :, t].to(dtype) + recurrent
        entry, forget, update, exit_ = gates.chunk(4, -1)
        new_cell = forget.sigmoid() * cell + entry.sigmoid() * update.tanh()
        new_hidden = exit_.sigmoid() * new_cell.tanh()
        is_taken = (t >= begin) & (t < end)
        hidden, cell = torch.where(is_taken, new_hidden, hidden), torch.where(is_taken, new_cell, cell)
        outputs.append(torch.where(t < end, hidden, 0))
    return torch.stack(outputs, 2).to(given.dtype), torch.stack((hidden, cell), 2).to(given.dtype)
