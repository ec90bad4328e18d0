"""LM heads on states: their logits, or their best tokens without writing the logits anywhere.

Equation:   logits[b, m] = W_m s[b, m], or B_m A_m s[b, m] with low-rank heads; one W may serve all m
Source:     the op `specdec.kernels.lm_head_topk`; where it cannot run, the module's own forward and `best_of`
Shapes:     s [B, M, C]; W [M or 1, V, C]; A [M, r, C], B [M, V, r]; logits [B, M, V]

Equal logits go to the lower token, whichever way is taken: PyTorch's `topk` leaves their order open.
"""

from typing import Any, cast

import torch
from torch import nn

from specdec.kernels.common.launch import Backend
from specdec.kernels.common.topk import TopK
from specdec.kernels.lm_head_topk import MAX_K, MAX_VOCAB, lm_head_topk

__all__ = ["LMHeads", "best_of"]


class LMHeads:
    """One LM head for all states, or one for each of M.

    Args:
        weight: [M, V, C], or [M, V, r] with `down`.
        down: [M, r, C] of low-rank heads.
        backend: what runs the kernels; by default decided by the device.
    """

    def __init__(self, weight: torch.Tensor, down: torch.Tensor | None = None, *, backend: Backend | None) -> None:
        self._weight = weight
        self._down = down
        self._module: Any = None
        self._backend = backend

    @classmethod
    def of(cls, module: nn.Module, *, backend: Backend | None) -> "LMHeads":
        """A model's own head, for all states. Whatever is no plain linear layer without bias is called as it is."""
        heads = cls.__new__(cls)
        heads._weight = heads._down = None  # type: ignore[assignment]  # the module's, which may move meanwhile
        heads._module = module
        heads._backend = backend
        return heads

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[B, M, V] logits of [B, M, C] states, in their dtype."""
        if self._module is not None:
            return cast(torch.Tensor, self._module(states))
        states = states.transpose(0, 1)
        if self._down is not None:
            states = torch.bmm(states, self._down.mT)
        return torch.bmm(states, self._weight.mT).transpose(0, 1)

    def best_tokens(self, states: torch.Tensor, k: int) -> torch.Tensor:
        """[B, M, k] integers: the best tokens of every state, best first."""
        weight = self._weight_for(states, k)
        return best_of(self.logits(states), k) if weight is None else self._run(states, weight, k).tokens

    def best(self, states: torch.Tensor, k: int) -> TopK:
        """The same with their logits and the log-sum-exp of all, for log-probabilities."""
        weight = self._weight_for(states, k)
        if weight is not None:
            return self._run(states, weight, k)
        logits = self.logits(states).float()
        tokens = best_of(logits, k)
        return TopK(logits.gather(2, tokens), tokens.int(), logits.logsumexp(-1), logits.isnan().any(-1))

    def best_unwritten(self, states: torch.Tensor) -> TopK | None:
        """The best token of every state, as `logits` and `argmax` find it; None if logits have to be written for that.

        In half precision logits of different tokens are often equal, once they are rounded as the module rounds them.
        """
        weight = self._weight_for(states, 1)
        return None if weight is None else self._run(states, weight, 1, rounded=True)

    def _weight_for(self, states: torch.Tensor, k: int) -> torch.Tensor | None:
        """[M or 1, V, C or r] what the kernel reads; None where PyTorch does the work.

        On a CPU the op's definition, which sorts the vocabulary, is only a slower way to the same tokens.
        """
        if self._backend == "reference" or (self._backend is None and states.device.type == "cpu") or k > MAX_K:
            return None
        weight = self._weight
        if self._module is not None:
            module = self._module
            is_plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.bias is None
            if not is_plain or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                return None
            weight = module.weight.detach()[None]
        return weight if weight.dtype == states.dtype and weight.shape[1] <= MAX_VOCAB else None

    def _run(self, states: torch.Tensor, weight: torch.Tensor, k: int, *, rounded: bool = False) -> TopK:
        options: dict[str, Any] = {"k": k, "rounded": rounded, "backend": self._backend}
        if self._module is None:
            return lm_head_topk(states.transpose(0, 1), weight, down=self._down, **options)
        best = lm_head_topk(states.reshape(1, -1, states.shape[2]), weight, **options)
        lead = states.shape[:2]
        return TopK(
            best.values.view(*lead, k), best.tokens.view(*lead, k), best.logsumexp.view(lead), best.has_nan.view(lead)
        )


def best_of(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[.., k] int64: the k largest logits of every row, best first, equal ones in the order of their tokens.

    As the op `lm_head_topk`: a NaN counts as -inf, and -0.0 equals 0.0.

    Args:
        logits: [.., V], contiguous in V or not.
        k: 1 to V.
    """
    clean = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).add_(0.0)
    # an int64 per logit that orders by value, then from the highest token to the lowest; no two are equal, so that
    # topk has no choice
    bits = clean.view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    places = torch.arange(logits.shape[-1] - 1, -1, -1, dtype=torch.int32, device=logits.device)
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(places).topk(k, dim=-1).indices
