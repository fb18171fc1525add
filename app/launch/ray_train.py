"""The driver of a run on Ray: `python -m app.launch.ray_train`, submitted by `ray job submit`.

Ray starts and connects the ranks; each calls the function behind `app.train`. If a worker is lost,
Ray starts all of them again, and the run resumes from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from app.launch.schedulers import RAY_VARIABLE
from app.process.reporting import report as report_error
from app.status import StatusConfig, status
from common.errors import ENVIRONMENT_ERROR, DataError, TrainingFault, UserError


def _train_rank(loop_config: dict[str, Any]) -> None:
    """Train as one rank, whose number Ray has set in the environment.

    Ray gets the step and the latest metrics after each validation, and the final loss.
    """
    from lightning.pytorch.callbacks import LambdaCallback
    from ray.train import report

    from app.config import TrainConfig, load_config
    from app.train import train

    # As Ray has placed the workers, which may be fewer machines than asked for.
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = "auto" if loop_config["is_elastic"] else ranks // here
    devices = [f"trainer.num_nodes={nodes}", f"trainer.devices={here}"]
    config = load_config("train", [*loop_config["words"], *devices])
    assert isinstance(config, TrainConfig)
    reporter = LambdaCallback(
        on_validation_end=lambda trainer, module: report(
            {"step": trainer.global_step, **module.metrics.latest}
        )
    )
    try:
        loss = train(config, callbacks=[reporter])
    except (UserError, DataError, TrainingFault) as error:
        report_error(error)  # Ray would start all ranks again, only to fail in the same way
        return
    report({} if loss is None else {"val/loss": loss})


def main() -> int:
    """Train what the job's environment says; return the exit code of the run."""
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    job = json.loads(os.environ[RAY_VARIABLE])
    ranks, fewest = job["ranks_per_node"], job["min_nodes"]
    workers = job["nodes"] * ranks
    trainer = TorchTrainer(
        _train_rank,
        train_loop_config={"words": job["words"], "is_elastic": fewest is not None},
        scaling_config=ScalingConfig(
            num_workers=workers if fewest is None else (fewest * ranks, workers),
            use_gpu=job["uses_gpus"],
            placement_strategy="PACK" if ranks > 1 else "SPREAD",
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=job["max_failures"])),
    )
    try:
        trainer.fit()
    except (RayError, RuntimeError) as error:  # TrainingFailedError was one, and is the other
        print(error, file=sys.stderr)
        return status(StatusConfig(run=job["folder"])) or ENVIRONMENT_ERROR
    return status(StatusConfig(run=job["folder"]))


if __name__ == "__main__":
    sys.exit(main())
