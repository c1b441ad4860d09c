"""Room not furnished yet."""

if __name__ != "lit_pretrain.callbacks":
    raise ImportError("callbacks/ is part of lit-pretrain: import it as lit_pretrain.callbacks.")
