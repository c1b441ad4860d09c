"""Batches for Lightning: the same global batches on any number of ranks, and exact resume."""

from lit_pretrain.data.baselines import NgramBaselines, ngram_baselines
from lit_pretrain.data.datamodule import TokenDataModule
from lit_pretrain.data.loader import PlanLoader

__all__ = ["NgramBaselines", "PlanLoader", "TokenDataModule", "ngram_baselines"]
