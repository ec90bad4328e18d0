"""Falcon's network: an LSTM and one decoder layer, which look k places ahead and at k places in one pass.

Equation:   u_t = [e(x_{t+1}); h_t];  z = LSTM(u), two layers, 2C -> C -> C
            g_t = layer(z)_t, a guess of h_{t+k};  LM_head(g_t): token t + k + 1
            LSTM cell: (i, f, o, c~) = W [u_t; y_{t-1}] + b;  c_t = s(f) c_{t-1} + s(i) tanh(c~);  y_t = s(o) tanh(c_t)
Mask:       relaxed causal: a pair sees all k pairs of its own block, those after it too, and everything before it
Source:     Falcon (arXiv:2412.12639) sections 3.1 and 3.2; the layer is EAGLE-1's, without input norm and final norm
Shapes:     e, h, z, g [B, T, C]; states of the LSTM [B, S], S = 4C (hidden and cell state of two layers), or 0

The keys and values of a pair depend on the pairs up to it through the LSTM alone, and not on who sees whom: what is in
the cache holds for any division of the text into blocks. The target's embedding and LM head are shared and not in here.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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
        self, features: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
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
        fused = self.lstm(joined)[0] if self.config.recurrent else self._fuse_each(joined)
        return self.decode(fused, positions, attend)

    def decode(self, fused: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
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

    @property
    def state_size(self) -> int:
        """S, width of what the LSTM remembers of a text."""
        return 2 * _LSTM_LAYERS * self.config.hidden_size if self.config.recurrent else 0

    def fuse_prompt(
        self, features: torch.Tensor, embedded: torch.Tensor, counts: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the LSTM over a chunk of prompts; copies the counts to the host.

        Args:
            features: [B, T, C] states, at least one pair wide.
            embedded: [B, T, C] embedding of the token after each.
            counts: [B] int, pairs of each row that count, 0 to T.
            state: [B, S] state before the first pair; zeros where a text begins.

        Returns:
            [B, T, C] outputs, valid up to the count, and [B, S] the state there.
        """
        joined = torch.cat((embedded, features), -1)
        if not self.config.recurrent:
            return self._fuse_each(joined), state
        # a packed sequence needs one pair at least; what the others of these rows leave behind is taken out below
        packed = pack_padded_sequence(joined, counts.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        start = state.view(joined.shape[0], _LSTM_LAYERS, 2, -1).transpose(0, 1)  # [layer, B, hidden or cell, C]
        outputs, last = self.lstm(packed, (start[:, :, 0].contiguous(), start[:, :, 1].contiguous()))
        fused = pad_packed_sequence(outputs, batch_first=True, total_length=joined.shape[1])[0]
        after = torch.stack(last, 2).transpose(0, 1).flatten(1)
        return fused, torch.where((counts == 0)[:, None], state, after)

    def fuse(
        self, features: torch.Tensor, embedded: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the LSTM a few pairs on.

        Args:
            features: [B, T, C] states.
            embedded: [B, T, C] embedding of the token after each.
            state: [B, S] state before the first pair.

        Returns:
            [B, T, C] outputs, and [B, T, S] the state after each pair.
        """
        outputs = torch.cat((embedded, features), -1)
        batch_size, length = outputs.shape[:2]
        if not self.config.recurrent:
            return self._fuse_each(outputs), state.new_empty(batch_size, length, 0)
        states = []
        for layer, start in enumerate(state.view(batch_size, _LSTM_LAYERS, 2, -1).unbind(1)):
            # nn.LSTM gives its cell state after the last pair only, and each row goes on from another one
            input_weight, hidden_weight = (getattr(self.lstm, f"weight_{name}_l{layer}") for name in ("ih", "hh"))
            input_bias, hidden_bias = (getattr(self.lstm, f"bias_{name}_l{layer}", None) for name in ("ih", "hh"))
            given = F.linear(outputs, input_weight, input_bias)
            hidden, cell = start.unbind(1)
            after = []
            for pair in range(length):
                gates = given[:, pair] + F.linear(hidden, hidden_weight, hidden_bias)
                entry, forget, update, exit_ = gates.chunk(4, -1)
                cell = forget.sigmoid() * cell + entry.sigmoid() * update.tanh()
                hidden = exit_.sigmoid() * cell.tanh()
                after.append(torch.stack((hidden, cell), 1))
            states.append(torch.stack(after, 1))  # [B, T, 2, C]
            outputs = states[-1][:, :, 0]
        return outputs, torch.stack(states, 2).flatten(2)

    def _fuse_each(self, joined: torch.Tensor) -> torch.Tensor:
        """The LSTM at every pair by itself: one step from a state of zeros."""
        if self.training:
            return self.lstm(joined.flatten(0, 1)[:, None])[0].view(*joined.shape[:2], -1)
        outputs, bias = joined, None
        for layer in range(_LSTM_LAYERS):  # without the recurrent weights, which multiply zeros: 8 of 20 C^2
            if self.config.lstm_bias:
                bias = getattr(self.lstm, f"bias_ih_l{layer}") + getattr(self.lstm, f"bias_hh_l{layer}")
            gates = F.linear(outputs, getattr(self.lstm, f"weight_ih_l{layer}"), bias)
            entry, _, update, exit_ = gates.chunk(4, -1)
            outputs = exit_.sigmoid() * (entry.sigmoid() * update.tanh()).tanh()
        return outputs
