"""Learning-rate curves as pure functions of a counter (updates or tokens); no torch."""

from lit_pretrain.schedules.curves import DecayShape, check, constant, cosine, inverse_sqrt, linear, wsd

__all__ = ["DecayShape", "check", "constant", "cosine", "inverse_sqrt", "linear", "wsd"]
