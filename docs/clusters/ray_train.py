"""Train with Ray Train: submit `python docs/clusters/ray_train.py` with `ray job submit`.

Ray starts and connects the ranks; each of them calls the function behind `app.train`. If a worker
is lost, Ray restarts all of them and the run resumes from the newest checkpoint.
"""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

NUM_NODES, GPUS_PER_NODE = 2, 8
OVERRIDES = [
    "+experiment=llama70b",
    f"trainer.num_nodes={NUM_NODES}",
    f"trainer.devices={GPUS_PER_NODE}",
    "resume=auto",
    "output.dir=/shared/runs/llama70b",
]


def train_rank(loop_config: dict[str, list[str]]) -> None:
    """Train as one rank; Ray has set its rank in the environment."""
    from app import load_config, train

    train(load_config("train", loop_config["overrides"]))


if __name__ == "__main__":
    TorchTrainer(
        train_rank,
        train_loop_config={"overrides": OVERRIDES},
        scaling_config=ScalingConfig(
            num_workers=NUM_NODES * GPUS_PER_NODE,
            use_gpu=True,
            placement_strategy="PACK",
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
