"""When a kernel's floats are right: judged against the error that eager PyTorch makes in the same dtype."""

import torch

# One rounding of the result: what is left when the same-dtype eager computation happens to be exact.
FLOOR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close_to_reference(kernel, reference64, eager, *, scale=1.0):
    """Check `err(kernel, ref64) <= 2 * err(eager same dtype, ref64) + floor(dtype) * scale`, elementwise maximum."""
    assert kernel.shape == reference64.shape
    assert kernel.dtype == eager.dtype
    assert torch.isfinite(kernel).all(), "the kernel left elements unwritten or produced NaN"
    kernel_error = (kernel.double() - reference64.double()).abs().max().item() if kernel.numel() else 0.0
    eager_error = (eager.double() - reference64.double()).abs().max().item() if kernel.numel() else 0.0
    bound = 2 * eager_error + FLOOR[kernel.dtype] * scale
    assert kernel_error <= bound, f"error {kernel_error:.3g} > {bound:.3g} (eager: {eager_error:.3g})"


def doubled(value):
    """A tensor in float64, those of a list as well; None stays None."""
    if isinstance(value, list):
        return [doubled(item) for item in value]
    return None if value is None else value.double()


def assert_op_close(op, reference, *args, **options):
    """Check every result of an op on floating-point arguments, with the largest number of the result as the scale."""
    results = op(*args, **options, backend="triton")
    expected = reference(*map(doubled, args), **options)
    eager = reference(*args, **options, upcast=False)
    if isinstance(results, torch.Tensor):
        results, expected, eager = (results,), (expected,), (eager,)
    for got, want, rounded in zip(results, expected, eager, strict=True):
        assert got.is_contiguous()
        assert_close_to_reference(got, want, rounded, scale=max(1.0, want.abs().max().item()))
