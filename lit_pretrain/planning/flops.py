"""Floating-point operations of a trained token, and what devices can do in a second."""

from __future__ import annotations

import re

from lit_pretrain.errors import ConfigError
from lit_pretrain.planning.parameters import matrix_parameters
from lit_pretrain.specs import GPTConfig

# Dense 16-bit matrix FLOP/s (bf16; fp16 where the device has no bf16), without sparsity, by a part of the name that
# the driver reports, as whole words; the longest match counts. Figures are those of the makers' data sheets.
PEAK_FLOPS: dict[str, float] = {
    "GB200": 2500e12,  # NVIDIA GB200 data sheet, one GPU of the two: 5 PFLOP/s with sparsity, halved
    "B200": 2250e12,  # NVIDIA HGX B200 data sheet: 4.5 PFLOP/s with sparsity, halved
    "H200": 989.5e12,  # NVIDIA H200 data sheet: 1,979 TFLOP/s with sparsity, halved; same die as H100 SXM
    "GH200": 989.5e12,  # NVIDIA GH200 data sheet, likewise
    "H100 PCIe": 756.5e12,  # NVIDIA H100 data sheet, PCIe column: 1,513 with sparsity, halved
    "H100 NVL": 835.5e12,  # NVIDIA H100 data sheet, NVL column: 1,671 with sparsity, halved
    "H100": 989.5e12,  # NVIDIA H100 data sheet, SXM column: 1,979 with sparsity, halved
    "H800": 989.5e12,  # compute of the H100 SXM, slower links
    "H20": 148e12,  # NVIDIA H20 data sheet
    "A100": 312e12,  # NVIDIA A100 data sheet
    "A800": 312e12,  # compute of the A100, slower links
    "A40": 149.7e12,  # NVIDIA A40 data sheet, without sparsity
    "A10G": 70e12,  # AWS figures for the G5 instances; half the tensor rate of the A10
    "A10": 125e12,  # NVIDIA A10 data sheet
    "L40S": 362.05e12,  # NVIDIA L40S data sheet, without sparsity
    "L40": 181.05e12,  # NVIDIA L40 data sheet, without sparsity
    "L4": 121e12,  # NVIDIA L4 data sheet: 242 with sparsity, halved
    "V100": 125e12,  # NVIDIA V100 SXM2 data sheet, fp16
    "T4": 65e12,  # NVIDIA T4 data sheet, fp16
    "RTX 5090": 209.5e12,  # NVIDIA Blackwell GeForce white paper, fp32 accumulation
    "RTX 4090": 165.2e12,  # NVIDIA Ada white paper, appendix A, fp32 accumulation
    "RTX 4080": 97.5e12,  # NVIDIA Ada white paper, fp32 accumulation
    "RTX 3090": 71e12,  # NVIDIA GA102 white paper, fp32 accumulation
    "RTX A6000": 154.8e12,  # NVIDIA RTX A6000 data sheet, without sparsity
    "MI300X": 1307.4e12,  # AMD Instinct MI300X data sheet
    "MI250X": 383e12,  # AMD Instinct MI250X data sheet, both dies
}


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of a device, or None for one not in ``PEAK_FLOPS``.

    Args:
        device_name: As the driver gives it, such as ``NVIDIA A100-SXM4-80GB``.
    """
    matches = [
        (len(part), peak)
        for part, peak in PEAK_FLOPS.items()
        if re.search(rf"(?<![a-z0-9]){part}(?![a-z0-9])", device_name, re.IGNORECASE)
    ]
    # The longest part wins: "H100 PCIe" over "H100".
    return max(matches)[1] if matches else None


def flops_per_token(config: GPTConfig, sequence_length: int, *, causal: bool = False) -> float:
    """FLOPs of forward and backward for one trained token: ``6 N + 12 L H D T``.

    N counts the weights that multiply: the blocks' matrices and the head over real tokens, tied or not; embeddings
    are looked up, not multiplied. Two FLOPs a multiply-add, backward twice the forward, nothing for recomputation.
    Attention counts the full T x T products, as is usual for utilisation, although half of them are masked.

    Args:
        config: The architecture.
        sequence_length: T, tokens.
        causal: Count only the half of attention that a causal kernel computes: on average (T + 1) / 2 keys a query.

    Raises:
        ConfigError: ``sequence_length`` is below 1.

    Source: Chowdhery et al. 2022 (PaLM), appendix B; the head as in Hoffmann et al. 2022 (Chinchilla), appendix F.
    """
    if sequence_length < 1:
        raise ConfigError(f"sequence_length={sequence_length} must be at least 1.")
    multiplied = config.n_layer * matrix_parameters(config) + config.vocab_size * config.n_embd
    keys = (sequence_length + 1) / 2 if causal else sequence_length
    return 6.0 * multiplied + 12.0 * config.n_layer * config.n_head * config.head_size * keys
