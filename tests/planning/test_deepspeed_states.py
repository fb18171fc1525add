"""Our copies of DeepSpeed's estimators agree with the originals."""

from __future__ import annotations

import itertools
import os
from unittest import mock

import pytest

from app.planning.describe import estimate_zero2_states, estimate_zero3_states

MACHINES = ((1, 1), (8, 1), (8, 4))
MODELS = ((2851e6, 32e6), (8.03e9, 525e6), (70.6e9, 1050e6))


def test_estimates_equal_those_of_deepspeed() -> None:
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
        pytest.importorskip("deepspeed")
        from deepspeed.runtime.zero import stage3, stage_1_and_2
    rows = 0
    for (weights, layer), (gpus, nodes) in itertools.product(MODELS, MACHINES):
        here = {"num_gpus_per_node": gpus, "num_nodes": nodes}
        for offloads in (False, True):
            host, gpu = stage_1_and_2.estimate_zero2_model_states_mem_needs(
                weights, cpu_offload=offloads, **here
            )
            ours = estimate_zero2_states(
                weights, gpus_per_node=gpus, num_nodes=nodes, offloads=offloads
            )
            assert ours == pytest.approx((gpu, host), rel=0.01)
            rows += 1
        for optimizer, parameters in ((False, False), (True, False), (True, True)):
            host, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(
                weights,
                layer,
                cpu_offload=optimizer,
                cpu_offload_params=parameters,
                zero_init=False,
                **here,
            )
            ours = estimate_zero3_states(
                weights,
                layer,
                gpus_per_node=gpus,
                num_nodes=nodes,
                offloads_optimizer=optimizer,
                offloads_weights=parameters,
            )
            assert ours == pytest.approx((gpu, host), rel=0.01)
            rows += 1
    assert rows == 9 * 5


def test_known_figures_of_deepspeeds_estimators() -> None:
    def gib(states: tuple[float, float]) -> float:
        return round(states[0] / 2**30, 2)

    two = [estimate_zero2_states(2851e6, gpus_per_node=8, offloads=flag) for flag in (True, False)]
    assert [gib(states) for states in two] == [5.31, 11.28]
    three = [
        estimate_zero3_states(
            2851e6, 32e6, gpus_per_node=8, offloads_optimizer=states, offloads_weights=weights
        )
        for states, weights in ((True, True), (True, False), (False, False))
    ]
    assert [gib(states) for states in three] == [0.12, 0.78, 6.09]
