"""Room not furnished yet."""

if __name__ != "lit_pretrain.conf":
    raise ImportError("conf/ is part of lit-pretrain: import it as lit_pretrain.conf.")
