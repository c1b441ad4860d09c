"""Loss spikes: what is one, and what a run does about it; pure, no torch."""

from lit_pretrain.spikes.detector import SpikeDetector
from lit_pretrain.spikes.rules import MeanRule, RobustRule, SpikeRule
from lit_pretrain.spikes.verdict import Kind, Verdict

__all__ = ["Kind", "MeanRule", "RobustRule", "SpikeDetector", "SpikeRule", "Verdict"]
