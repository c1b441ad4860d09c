"""How a GPT can be split over ranks, as data; the model itself knows no strategy."""

from __future__ import annotations

from lit_pretrain.planning.layouts import tensor_parallel_limits
from lit_pretrain.specs import GPTConfig, ParallelPlan, TensorStyle


def gpt_plan(config: GPTConfig) -> ParallelPlan:
    """The plan of a GPT, with names relative to it. Every parameter is in it, so that all share one mesh.

    Args:
        config: The architecture.
    """
    styles: dict[str, TensorStyle] = {"wte": "vocabulary"}
    if config.position == "learned":
        styles["wpe"] = "positions"
    styles |= {
        "blocks.*.attn_norm": "norm",
        "blocks.*.attn": "enter",
        "blocks.*.attn.q_proj": "column",
        "blocks.*.attn.k_proj": "column",
        "blocks.*.attn.v_proj": "column",
        "blocks.*.attn.o_proj": "row",
    }
    if config.qk_norm:
        styles |= {"blocks.*.attn.q_norm": "head_norm", "blocks.*.attn.k_norm": "head_norm"}
    styles |= {
        "blocks.*.mlp_norm": "norm",
        "blocks.*.mlp": "enter",
        "blocks.*.mlp.up_proj": "column",
        "blocks.*.mlp.down_proj": "row",
    }
    if config.mlp == "swiglu":
        styles["blocks.*.mlp.gate_proj"] = "column"
    styles["norm"] = "final_norm"
    if not config.tie_embeddings:
        styles["head"] = "vocabulary_head"
    return ParallelPlan(
        tensor_parallel=styles,
        divisible=tensor_parallel_limits(config),
        sequence_parallel=True,
        sharded_dropout=("blocks.*.attn",),
        attention=("blocks.*.attn",),
        units=("blocks.*",),
        embed=("wte", "wpe") if config.position == "learned" else ("wte",),
        blocks="blocks",
        head=("norm", "wte" if config.tie_embeddings else "head"),
    )
