"""A trainer that trains nothing: the run ends as `tests.launch.programs` was asked for."""

from typing import Any

from ray.exceptions import RayError


class TorchTrainer:
    def __init__(self, function: Any, *, train_loop_config: Any, **options: Any) -> None:
        self.function, self.config, self.options = function, train_loop_config, options

    def fit(self) -> None:
        from tests.launch.programs import train

        if train(self.config["words"]):
            raise RayError("a worker has failed")
