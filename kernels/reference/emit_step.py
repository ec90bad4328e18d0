"""Eager reference of kernels.emit_step: the definition, and what CPU decoding runs."""

import torch

__all__ = ["emit_step"]


def emit_step(
    num_accepted: torch.Tensor,
    emitted: torch.Tensor,
    deepest: torch.Tensor,
    has_nan: torch.Tensor,
    stop_tokens: torch.Tensor | None,
    output_: torch.Tensor,
    num_output_: torch.Tensor,
    root_: torch.Tensor,
    budget_: torch.Tensor,
    lengths_: torch.Tensor | None,
    progress_: torch.Tensor,
    step_: torch.Tensor,
    steps_: torch.Tensor,
    nan_rows_: torch.Tensor | None = None,
) -> None:
    """Append what a step emitted, end the rows that have finished, and note what the step did.

    Shapes, dtypes and meaning are those of `specdec.kernels.emit_step.emit_step`; arguments are not checked.
    """
    (was_running, first_nan), step = progress_.tolist(), int(step_)
    stops = set() if stop_tokens is None else set(stop_tokens.tolist())
    counts = [accepted + 1 for accepted in num_accepted.tolist()]
    places, roots, budgets = num_output_.tolist(), root_.tolist(), budget_.tolist()

    is_nan = [nan and budget > 0 for nan, budget in zip(has_nan.any(1).tolist(), budgets, strict=True)]
    if any(is_nan) and first_nan < 0:
        first_nan = step
    if nan_rows_ is not None:
        nan_rows_ |= nan_rows_.new_tensor(is_nan)
    for row, (count, tokens) in enumerate(zip(counts, emitted.tolist(), strict=True)):
        if count > 0:
            output_[row, places[row] : places[row] + count] = emitted[row, :count]
            roots[row] = tokens[count - 1]
        budgets[row] = 0 if roots[row] in stops else budgets[row] - count

    root_.copy_(root_.new_tensor(roots))
    budget_.copy_(budget_.new_tensor(budgets))
    num_output_ += num_accepted + 1
    if lengths_ is not None:
        lengths_ += num_accepted + 1
    if step < len(steps_):
        steps_[step, 0] = num_accepted + 1
        steps_[step, 1] = deepest
    progress_.copy_(progress_.new_tensor([any(budgets), first_nan]))
    step_ += was_running
