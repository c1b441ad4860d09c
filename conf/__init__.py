"""The configuration of the command line: plain YAML, on anybody's Hydra search path as ``pkg://lit_pretrain.conf``."""

if __name__ != "lit_pretrain.conf":
    raise ImportError("conf/ is part of lit-pretrain: import it as lit_pretrain.conf.")
