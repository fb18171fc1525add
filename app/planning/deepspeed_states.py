"""What DeepSpeed's own estimators say of model states, for people who know these figures.

They are of training every weight in half precision with fp32 master weights: 2 bytes a weight and 2
a gradient in half precision, and 16 in fp32 for gradient, weight and AdamW's two states. No
activations. Up to some release before 0.19 those of ZeRO-2 counted gradients as if each GPU kept
all of them (4 + 16 / GPUs bytes a weight, where 0.19 has 2 + 18 / GPUs): 15.93 GB instead of 11.28
for 2,851 M weights on 8 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.planning.memory import GIB, PlannedRun
from app.strategy.settings import ZeroConfig

HALF_BYTES, FP32_BYTES = 2, 16
"""a weight in half precision, and all that is in fp32 for it; a half gradient makes it 18"""
BUFFERS = 1.5
"""host memory that DeepSpeed counts for each byte, for its buffers"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes of model states on one GPU, and on the host of one node."""

    gpu: float
    host: float


def estimate_zero2_states(
    num_weights: float, *, gpus_per_node: int, num_nodes: int = 1, offloads: bool = False
) -> ModelStates:
    """Return what ZeRO-2 keeps, with optimizer states on the host where it offloads."""
    gpus = gpus_per_node * num_nodes
    if offloads:
        host = num_weights * max(4 * gpus, FP32_BYTES)
        return ModelStates(gpu=HALF_BYTES * num_weights, host=host * BUFFERS)
    gpu = HALF_BYTES * num_weights + (HALF_BYTES + FP32_BYTES) * num_weights / gpus
    return ModelStates(gpu=gpu, host=4 * num_weights * gpus_per_node * BUFFERS)


def estimate_zero3_states(
    num_weights: float,
    largest_layer: float,
    *,
    gpus_per_node: int,
    num_nodes: int = 1,
    offloads_optimizer: bool = False,
    offloads_weights: bool = False,
    loads_in_shares: bool = False,
) -> ModelStates:
    """Return what ZeRO-3 keeps; `largest_layer`: weights of the layer that is gathered.

    `loads_in_shares`: DeepSpeed's zero.Init, by which no process builds the whole model.
    """
    gathered, gpus = 2 * HALF_BYTES * largest_layer, gpus_per_node * num_nodes
    a_weight = HALF_BYTES + FP32_BYTES
    if not offloads_optimizer:
        loaded = largest_layer if loads_in_shares else num_weights
        host = 4 * loaded * gpus_per_node
        return ModelStates(gpu=gathered + a_weight * num_weights / gpus, host=host * BUFFERS)
    on_host = a_weight if offloads_weights else FP32_BYTES
    share = num_weights * on_host / num_nodes
    loading = 0.0 if loads_in_shares else 4 * num_weights * gpus_per_node
    here = 0.0 if offloads_weights else HALF_BYTES * num_weights / gpus
    return ModelStates(gpu=gathered + here, host=max(share, loading) * BUFFERS)


def states_by_deepspeed(run: PlannedRun) -> dict[str, float] | None:
    """Return the GiB that DeepSpeed's estimator says; None of what it does not know."""
    strategy, gpus = run.strategy, run.hardware.gpus_per_node
    if not isinstance(strategy, ZeroConfig) or strategy.stage == 1 or not run.trains_base:
        return None
    offloads, weights = strategy.offload_optimizer != "none", float(run.model.num_weights)
    if strategy.stage == 2:
        states = estimate_zero2_states(
            weights, gpus_per_node=gpus, num_nodes=run.num_nodes, offloads=offloads
        )
    else:
        states = estimate_zero3_states(
            weights,
            run.model.head_weights,
            gpus_per_node=gpus,
            num_nodes=run.num_nodes,
            offloads_optimizer=offloads,
            offloads_weights=strategy.offload_parameters != "none",
        )
    return {"gpu": states.gpu / GIB, "host": states.host / GIB}
