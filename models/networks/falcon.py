"""Falcon's network: an LSTM and one decoder layer, which look k places ahead and at k places in one pass.

Equation:   u_t = [e(x_{t+1}); h_t];  z = LSTM(u), two layers, 2C -> C -> C
            g_t = layer(z)_t, a guess of h_{t+k};  LM_head(g_t): token t + k + 1
            LSTM cell: (i, f, o, c~) = W [u_t; y_{t-1}] + b;  c_t = s(f) c_{t-1} + s(i) tanh(c~);  y_t = s(o) tanh(c_t)
Mask:       relaxed causal: a pair sees all k pairs of its own block, those after it too, and everything before it
Source:     Falcon (arXiv:2412.12639) sections 3.1 and 3.2; the layer is EAGLE-1's, without input norm and final norm
Shapes:     e, h, z, g [B, T, C]; state of a layer of the LSTM [B, P, 2, C], hidden and cell, for each of P branches

The keys and values of a pair depend on the pairs up to it through the LSTM alone, and not on who sees whom: what is in
the cache holds for any division of the text into blocks. The target's embedding and LM head are shared and not in here.
"""

import functools
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from specdec.kernels.lstm_recurrence import lstm_recurrence
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import Attend, DraftLayer, LayerNetworkConfig, Rotary

__all__ = ["FalconConfig", "FalconNetwork"]

_LSTM_LAYERS = 2
# Initial values: gates of the second layer see about unit variance from the 0.2 that the first one says, and output
# gates begin at sigmoid(2) = 0.88.
_SECOND_LAYER_GAIN = 5.0
_OPEN_GATE = 2.0


@dataclass(frozen=True, slots=True)
class FalconConfig(LayerNetworkConfig):
    """Sizes and switches of a Falcon network.

    Attributes:
        block_size: k, tokens per pass; 2 to 4 in the paper.
        recurrent: the LSTM runs along the tokens, as the paper has it; False starts it anew at every token, which is
            what the authors' code trains and runs.
        lstm_bias: whether the LSTM has biases.
        lstm_dropout: dropout between the layers of the LSTM in training.
    """

    block_size: int = 2
    recurrent: bool = True
    lstm_bias: bool = True
    lstm_dropout: float = 0.1

    def __post_init__(self) -> None:
        LayerNetworkConfig.__post_init__(self)
        if not 1 <= self.block_size <= 32:
            raise ValueError(f"block_size: expected 1 to 32, got {self.block_size}")
        if not 0 <= self.lstm_dropout < 1:
            raise ValueError(f"lstm_dropout: expected at least 0 and below 1, got {self.lstm_dropout}")


class FalconNetwork(DraftNetwork):
    """Two LSTM layers and a decoder layer, under the authors' names.

    Args:
        config: sizes and switches.
    """

    config_class = FalconConfig
    config: FalconConfig

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.lstm = nn.LSTM(
            2 * width,
            width,
            num_layers=_LSTM_LAYERS,
            bias=config.lstm_bias,
            dropout=config.lstm_dropout,
            batch_first=True,
        )
        self.layers = nn.ModuleList([DraftLayer(config.layer, input_norm=False)])
        self.rotary = Rotary(config.layer)

    def forward(
        self, features: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """Guesses at all pairs of texts, from their beginning.

        Args:
            features: [B, T, C] states h_t.
            embedded: [B, T, C] the target's embedding of the token after each.
            positions: [B or 1, T] position of each pair.
            attend: who sees whom.

        Returns:
            [B, T, C] guesses of h_{t+k}, which the target's LM head turns into logits of token t + k + 1.
        """
        joined = torch.cat((embedded, features), -1)
        if self.config.recurrent:
            fused = self.lstm(joined)[0]
        else:  # every pair is a text of its own
            fused = self.lstm(joined.flatten(0, 1)[:, None])[0].view(*joined.shape[:2], -1)
        return self.decode(fused, positions, attend)

    def decode(self, fused: torch.Tensor, positions: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """The decoder layer: [B, T, C] outputs of the LSTM to guesses of states."""
        return self.layers[0](fused, self.rotary.at(fused, positions), attend, backend=self.backend)

    @torch.no_grad()
    def start_from(self, embedding: torch.Tensor) -> None:
        """Begin training: the LSTM says as much about tokens as about states, and speaks up.

        At PyTorch's initial values it hands on a twentieth of what it reads, and of that nearly nothing is the token's:
        embeddings are an order of magnitude smaller than the normalised states beside them.

        Args:
            embedding: [V, C] the target's embeddings.
        """
        width = self.config.hidden_size
        values = dict(self.lstm.named_parameters())
        values["weight_ih_l0"][:, :width].div_(embedding.float().std())
        values["weight_ih_l1"].mul_(_SECOND_LAYER_GAIN)
        if self.config.lstm_bias:
            for layer in range(_LSTM_LAYERS):
                values[f"bias_ih_l{layer}"][3 * width :].add_(_OPEN_GATE)

    def zero_state(self, batch_size: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the LSTM remembers of no text: [B, 1, 2, C] of each layer; nothing if it starts anew at every pair."""
        shape = batch_size, 1, 2, self.config.hidden_size
        return tuple(like.new_zeros(shape) for _ in range(_LSTM_LAYERS if self.config.recurrent else 0))

    def fuse(
        self,
        features: torch.Tensor,
        embedded: torch.Tensor,
        state: tuple[torch.Tensor, ...],
        *,
        source: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the LSTM a few pairs on, along P branches of every text; no gradients.

        Args:
            features: [B, P, T, C] states.
            embedded: [B, P, T, C] embedding of the token after each.
            state: [B, P0, 2, C] of each layer, before the first pair that is read.
            source: [P] integers, which of the P0 states each branch goes on from; None for its own.
            first: [B] integers, the first pair that is read; None for 0.
            counts: [B] integers, one past the last pair that is read; None for T.

        Returns:
            [B, P, T, C] outputs: before the first pair that of the pair before it, behind the last one 0. And the state
            of each layer after the last pair, [B, P, 2, C].
        """
        outputs = torch.cat((embedded, features), -1)
        batch_size, num_branches, length = outputs.shape[:3]
        after = []
        for layer in range(_LSTM_LAYERS):
            parameter = functools.partial(self._parameter, layer)
            given = F.linear(outputs, cast(torch.Tensor, parameter("weight_ih")), parameter("bias_ih"))
            recurrent = cast(torch.Tensor, parameter("weight_hh")), parameter("bias_hh")
            if self.config.recurrent:
                begin = state[layer], source, first, counts
                outputs, last = lstm_recurrence(given, *recurrent, *begin, backend=self.backend)
                after.append(last)
            else:  # a branch of one step from zeros for every pair
                each = given.reshape(batch_size, num_branches * length, 1, -1)
                outputs = lstm_recurrence(each, *recurrent, backend=self.backend)[0].view(*given.shape[:3], -1)
        return outputs, tuple(after)

    def _parameter(self, layer: int, name: str) -> torch.Tensor | None:
        """A layer's weight or bias of the LSTM; None of a bias that it has not."""
        return getattr(self.lstm, f"{name}_l{layer}", None)
