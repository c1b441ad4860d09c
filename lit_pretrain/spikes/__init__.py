"""Loss spikes: what is one, and what a run does about it; pure, no torch."""

from lit_pretrain.spikes.detector import SpikeDetector
from lit_pretrain.spikes.ledger import Skip, SkipLedger
from lit_pretrain.spikes.ledger_file import LedgerFile
from lit_pretrain.spikes.policy import Decision, RollbackPolicy, SnapshotPoint
from lit_pretrain.spikes.rules import Finding, MeanRule, RobustRule, SpikeRule
from lit_pretrain.spikes.verdict import Kind, Verdict

__all__ = [
    "Decision",
    "Finding",
    "Kind",
    "LedgerFile",
    "MeanRule",
    "RobustRule",
    "RollbackPolicy",
    "Skip",
    "SkipLedger",
    "SnapshotPoint",
    "SpikeDetector",
    "SpikeRule",
    "Verdict",
]
