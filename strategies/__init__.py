"""Room not furnished yet."""

if __name__ != "lit_pretrain.strategies":
    raise ImportError("strategies/ is part of lit-pretrain: import it as lit_pretrain.strategies.")
