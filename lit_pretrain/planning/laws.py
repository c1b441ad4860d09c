"""Published laws of how the loss of a language model falls with parameters and data."""

from __future__ import annotations

from dataclasses import dataclass

from lit_pretrain.errors import ConfigError

FLOPS_PER_PARAMETER = 6.0  # of a trained token, forward and backward: C = 6 N D

# Of the runs that both laws were fitted to (Hoffmann et al. 2022, abstract).
FITTED_PARAMETERS = (70e6, 16e9)
FITTED_TOKENS = (5e9, 500e9)


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """``L(N, D) = E + A / N^alpha + B / D^beta``, in nats per token of the text and tokenizer it was fitted on.

    Args:
        name: Of the paper.
        floor: E, what no model of any size gets below.
        a: A.
        alpha: Exponent of parameters.
        b: B.
        beta: Exponent of tokens.
    """

    name: str
    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, *, parameters: float, tokens: float) -> float:
        """Predicted loss, in nats per token.

        Args:
            parameters: N.
            tokens: D, trained on once each.
        """
        return float(self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def gain(self, *, parameters: float, tokens: float) -> float:
        """How much the loss still falls per FLOP, ``-dL/dC`` with ``C = 6 N D`` and N held, in nats."""
        return float(self.beta * self.b / tokens ** (self.beta + 1.0) / (FLOPS_PER_PARAMETER * parameters))

    def tokens_at_gain(self, gain: float, *, parameters: float) -> float:
        """The tokens from which on more of them gain less than ``gain`` nats per FLOP."""
        if not gain > 0.0:
            raise ConfigError(f"gain={gain} must be above 0 nats per FLOP.")
        return float((self.beta * self.b / (FLOPS_PER_PARAMETER * parameters * gain)) ** (1.0 / (self.beta + 1.0)))


LAWS: dict[str, ScalingLaw] = {
    # Hoffmann et al. 2022 (Chinchilla), section 3.3 and appendix D.3, equation 10.
    "hoffmann": ScalingLaw(name="Hoffmann et al. 2022", floor=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28),
    # Besiroglu et al. 2024, a second fit to the data of Hoffmann et al., section 3.
    "besiroglu": ScalingLaw(name="Besiroglu et al. 2024", floor=1.8172, a=482.01, alpha=0.3478, b=2085.43, beta=0.3658),
}
