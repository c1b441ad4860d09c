"""Lightning strategies: none of ours yet; `single` and `ddp` are Lightning's own."""

if __name__ != "lit_pretrain.strategies":
    raise ImportError("strategies/ is part of lit-pretrain: import it as lit_pretrain.strategies.")
