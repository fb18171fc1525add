"""What libraries are told before they are imported: no telemetry, no network for local files, no
warnings that mean nothing to a user, how its threads wait and how much its kernels keep."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from app.process.launch import is_first_rank
from data_modules import printable, redact

MEANINGLESS_WARNINGS = (
    # Batches are made on purpose in the main process, or their number is a setting.
    ".*does not have many workers.*",
    # The loaders are ours: their length and their epochs are the data plan's.
    ".*number of training batches.*smaller than the logging interval.*",
    ".*GPU available but not used.*",
    # No validation rows were asked for, or a resumed run has no step left.
    ".*Total length of `.*` across ranks is zero.*",
    # Our loaders begin where the checkpoint stands, by the data plan.
    ".*resuming from a checkpoint that ended before the epoch ended.*",
    # peft tells what saving without a hub look-up means; the base's name is in the manifest.
    ".*Could not find a config file in.*",
    # peft warns of what our own error then says.
    ".*adapter keys while loading.*",
    ".*not initialized from the model checkpoint.*",
    # Lightning runs the schedule after the optimizer; torch cannot see it through our optimizer.
    ".*lr_scheduler.step.*before.*optimizer.step.*",
    ".*LeafSpec.*is deprecated.*",
)


class CleanFormatter(logging.Formatter):
    """Words of events without secrets, and with the control characters in names escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return what is printed of an event."""
        return printable(redact(super().format(record)), keep="\n")


def quiet_libraries(*, offline: bool) -> None:
    """Set the environment and filters of this process; call before transformers is imported.

    `offline` forbids the hub: with a local model there is nothing to ask it, and no wait for it.
    """
    defaults = {
        # A thread that waits spins for a moment, then sleeps: spinning on makes a step many times
        # slower as soon as anything else runs, and sleeping at once costs small models a third.
        "GOMP_SPINCOUNT": "1000",
        # Half-precision products keep a kernel a shape. 1024 of them, as is the default, can cost a
        # small model as much memory as all the rest of it; with a few, each would be made again.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1" if offline else "0",
        "HF_HUB_OFFLINE": "1" if offline else "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for message in MEANINGLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # What will change in a library's next version is for us to follow, by the pinned versions.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # One line an event; ranks above 0 speak only when something is wrong.
    logging.basicConfig(
        level=logging.INFO if is_first_rank() else logging.WARNING,
        stream=sys.stdout,
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.setFormatter(CleanFormatter("%(message)s"))
    for noisy in ("bitsandbytes", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
