"""The LightningModule around the GPT."""

from lit_pretrain.module.gpt_module import GPTModule
from lit_pretrain.module.metrics import TokenLoss
from lit_pretrain.module.weighting import TargetWeighting

__all__ = ["GPTModule", "TargetWeighting", "TokenLoss"]
