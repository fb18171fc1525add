"""Ray Train's configs, as plain values."""

from types import SimpleNamespace

FailureConfig = RunConfig = ScalingConfig = SimpleNamespace
reported: list[dict[str, float]] = []
report = reported.append
