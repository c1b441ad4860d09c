"""Learning-rate curves as pure functions of a counter (updates or tokens), and how long they are; no torch."""

from lit_pretrain.schedules.curves import DecayShape, check, constant, cosine, inverse_sqrt, linear, wsd
from lit_pretrain.schedules.horizon import Horizon

__all__ = ["DecayShape", "Horizon", "check", "constant", "cosine", "inverse_sqrt", "linear", "wsd"]
