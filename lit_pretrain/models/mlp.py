"""The feed-forward half of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lit_pretrain.specs import GPTConfig


class MLP(nn.Module):
    """Two linear layers with a GELU in between, or the gated SwiGLU of three.

    Args:
        config: The architecture.

    Source: Radford et al. 2019 (GELU, tanh form); Shazeer 2020 (SwiGLU).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        self.gate_proj = nn.Linear(config.n_embd, config.ffn_size, bias=config.bias) if config.mlp == "swiglu" else None
        self.up_proj = nn.Linear(config.n_embd, config.ffn_size, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn_size, config.n_embd, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """What the block adds to the residual stream, (B, T, C)."""
        up = self.up_proj(x_BTC)
        if self.gate_proj is not None:
            hidden = F.silu(self.gate_proj(x_BTC)) * up
        else:
            hidden = F.gelu(up, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        out: Tensor = self.down_proj(hidden)
        return out
