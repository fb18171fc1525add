"""The driver of a run on Ray: `python -m app.launch.ray_train`, submitted by `ray job submit`.

Ray starts and connects the ranks; each calls the function behind `app.train`. If a worker is lost,
Ray starts all of them again, and the run resumes from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from app.launch.jobs import RAY_VARIABLE
from app.status import StatusConfig, status
from common.errors import DONE, ENVIRONMENT_ERROR


def train_rank(loop_config: dict[str, Any]) -> None:
    """Train as one rank, whose number Ray has set in the environment; report the loss to Ray."""
    from ray.train import report

    from app.config import TrainConfig, load_config
    from app.train import train

    config = load_config("train", loop_config["words"])
    assert isinstance(config, TrainConfig)
    loss = train(config)
    report({} if loss is None else {"val/loss": loss})


def main() -> int:
    """Train what the job's environment says; return the exit code of the run."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    job = json.loads(os.environ[RAY_VARIABLE])
    devices = [f"trainer.num_nodes={job['nodes']}", f"trainer.devices={job['ranks_per_node']}"]
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"words": [*job["words"], *devices]},
        scaling_config=ScalingConfig(
            num_workers=job["nodes"] * job["ranks_per_node"],
            use_gpu=job["uses_gpus"],
            placement_strategy="PACK",
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=job["max_failures"])),
    )
    try:
        trainer.fit()
    except RuntimeError as error:  # Ray's TrainingFailedError
        print(error, file=sys.stderr)
        return status(StatusConfig(run=job["folder"])) or ENVIRONMENT_ERROR
    status(StatusConfig(run=job["folder"]))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
