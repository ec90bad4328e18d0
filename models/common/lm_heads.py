"""LM heads on states: their logits, or their best tokens without writing the logits anywhere.

Equation:   logits[b, m] = W_m s[b, m] + u_m, or B_m A_m s[b, m] + u_m with low-rank heads; one W may serve all m
Source:     the op `specdec.kernels.lm_head_topk`; where it cannot run, the module's own forward and `best_of`
Shapes:     s [B, M, C]; W [M or 1, V, C]; A [M, r, C], B [M, V, r]; u [M or 1, V]; logits [B, M, V]

Equal logits go to the lower token, whichever way is taken: PyTorch's `topk` leaves their order open.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from specdec.kernels.common.launch import Backend
from specdec.kernels.common.topk import TopK
from specdec.kernels.lm_head_topk import MAX_K, MAX_VOCAB, lm_head_topk
from specdec.models.common.products import few_rows_linear

__all__ = ["LMHeads", "best_of"]


class LMHeads:
    """One LM head for all states, or one for each of M.

    Args:
        weight: [M, V, C], or [M, V, r] with `down`.
        down: [M, r, C] of low-rank heads.
        bias: [M, V].
        backend: what runs the kernels; by default decided by the device.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        down: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        backend: Backend | None,
    ) -> None:
        self._weights: tuple[torch.Tensor, torch.Tensor | None] = weight, bias
        self._down = down
        self._module: Any = None
        self._vocab_size: int | None = None
        self._added: torch.Tensor | None = None
        self._backend = backend

    @classmethod
    def of(cls, module: nn.Module, *, vocab_size: int | None = None, backend: Backend | None) -> "LMHeads":
        """A model's own head, for all states. Whatever is no plain linear layer is called as it is.

        Args:
            module: the head; one that gives its input back stands for logits that are there already.
            vocab_size: tokens that the logits are over, V by default: of a vocabulary that is padded otherwise, tokens
                beyond it are left out, and those that the head lacks are -inf.
            backend: what runs the kernels; by default decided by the device.
        """
        heads = cls.__new__(cls)
        heads._weights = heads._down = None  # type: ignore[assignment]  # the module's, which may move meanwhile
        heads._module = module
        heads._vocab_size = vocab_size
        heads._added = None
        heads._backend = backend
        return heads

    def over(self, vocab_size: int) -> "LMHeads":
        """The same module's head over a vocabulary of this size, as in `of`."""
        return LMHeads.of(self._module, vocab_size=vocab_size, backend=self._backend)

    def adding(self, logits: torch.Tensor) -> "LMHeads":
        """The same module's head with `logits [B, V]` added to those of all states of a row."""
        heads = LMHeads.of(self._module, backend=self._backend)
        heads._added = logits
        return heads

    def logits(self, states: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the dtype of the states.

        Args:
            states: [B, M, C]; [.., C] of a head for all states.
            tokens: [n] int64 of a head for all states: those that are asked for, in any order; all by default.

        Returns:
            [B, M, V] or [.., n].
        """
        if tokens is not None:
            weights = _plain_weights(self._module, self._vocab_size)
            if weights is None or self._added is not None:
                return self.logits(states)[..., tokens]
            weight, bias = weights[0][0], weights[1]
            return F.linear(states, weight[tokens], None if bias is None else bias[0, tokens])
        if self._module is not None:
            plain = None if torch.is_grad_enabled() else _plain_weights(self._module, None)
            if plain is None:
                logits = cast(torch.Tensor, self._module(states))
            else:
                logits = few_rows_linear(states, plain[0][0], None if plain[1] is None else plain[1][0])
            if self._added is not None:
                return logits + self._added[:, None]
            missing = 0 if self._vocab_size is None else self._vocab_size - logits.shape[-1]
            return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        states = states.transpose(0, 1)
        if self._down is not None:
            states = torch.bmm(states, self._down.mT)
        weight, bias = self._weights
        if bias is not None:
            return torch.baddbmm(bias[:, None], states, weight.mT).transpose(0, 1)
        return torch.bmm(states, weight.mT).transpose(0, 1)

    def best_tokens(self, states: torch.Tensor, k: int) -> torch.Tensor:
        """[B, M, k] integers: the best tokens of every state, best first."""
        weights = self._weights_for(states, k)
        return best_of(self.logits(states), k) if weights is None else self._run(states, weights, k).tokens

    def best(self, states: torch.Tensor, k: int) -> TopK:
        """The same with their logits and the log-sum-exp of all, for log-probabilities."""
        weights = self._weights_for(states, k)
        if weights is not None:
            return self._run(states, weights, k)
        logits = self.logits(states).float()
        tokens = best_of(logits, k)
        return TopK(logits.gather(2, tokens), tokens.int(), logits.logsumexp(-1), logits.isnan().any(-1))

    def best_unwritten(self, states: torch.Tensor) -> TopK | None:
        """The best token of every state, as `logits` and `argmax` find it; None if logits have to be written for that.

        In half precision logits of different tokens are often equal, once they are rounded as the module rounds them.
        """
        weights = self._weights_for(states, 1)
        return None if weights is None else self._run(states, weights, 1, rounded=True)

    def _weights_for(self, states: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """[M or 1, V, C or r] and [M or 1, V] what the kernel reads; None where PyTorch does the work.

        On a CPU the op's definition, which sorts the vocabulary, is only a slower way to the same tokens.
        """
        if self._backend == "reference" or (self._backend is None and states.device.type == "cpu"):
            return None
        weights = self._weights if self._module is None else _plain_weights(self._module, self._vocab_size)
        if weights is not None and self._added is not None:
            # a row of the batch is a head: all have the one weight, and what is added is each one's bias
            one, bias = weights
            many = one.expand(self._added.shape[0], -1, -1)
            weights = None if bias is not None or self._added.stride(1) != 1 else (many, self._added)
        if weights is None or k > min(MAX_K, weights[0].shape[1]) or weights[0].shape[1] > MAX_VOCAB:
            return None
        fits = all(tensor is None or tensor.dtype == states.dtype for tensor in weights)
        return weights if fits else None

    def _run(
        self,
        states: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor | None],
        k: int,
        *,
        rounded: bool = False,
    ) -> TopK:
        weight, bias = weights
        options: dict[str, Any] = {"k": k, "bias": bias, "rounded": rounded, "backend": self._backend}
        if self._module is None:
            return lm_head_topk(states.transpose(0, 1), weight, down=self._down, **options)
        if self._added is not None:
            best = lm_head_topk(states.contiguous(), weight, **options)
            sums = best.logsumexp.mT
            return TopK(best.values.transpose(0, 1), best.tokens.transpose(0, 1), sums, best.has_nan.mT)
        best = lm_head_topk(states.reshape(1, -1, states.shape[2]), weight, **options)
        lead = states.shape[:2]
        return TopK(
            best.values.view(*lead, k), best.tokens.view(*lead, k), best.logsumexp.view(lead), best.has_nan.view(lead)
        )


def _plain_weights(module: Any, vocab_size: int | None) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """[1, V, C] and [1, V] of a linear layer that does nothing else, for its first tokens; None of any other module."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        return None
    if not (module.bias is None or type(module.bias) is nn.Parameter):
        return None
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return None
    bias = None if module.bias is None else module.bias.detach()[None, :vocab_size]
    return module.weight.detach()[None, :vocab_size], bias


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
