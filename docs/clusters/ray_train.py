"""Train under Ray Train: `python docs/clusters/ray_train.py`, where `ray job submit` runs it.

Ray starts the ranks and connects them; each of them calls the function behind `app.train`. A worker
that is lost has all of them started again, which go on from the newest checkpoint.
"""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

NUM_NODES, GPUS_PER_NODE = 2, 8
WORDS = [
    "+experiment=llama70b",
    f"trainer.num_nodes={NUM_NODES}",
    f"trainer.devices={GPUS_PER_NODE}",
    "resume=auto",
    "output.dir=/shared/runs/llama70b",
]


def train_rank(settings: dict[str, list[str]]) -> None:
    """Train as one rank, which Ray has told which one it is."""
    from app import load_config, train

    train(load_config("train", settings["words"]))


if __name__ == "__main__":
    TorchTrainer(
        train_rank,
        train_loop_config={"words": WORDS},
        scaling_config=ScalingConfig(
            num_workers=NUM_NODES * GPUS_PER_NODE,
            use_gpu=True,
            placement_strategy="PACK",
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
