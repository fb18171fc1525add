"""The environment of the libraries, set before they are imported.

No telemetry, no network for local files, no warnings that mean nothing to a user; how threads wait
and how many kernels are cached.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from app.process.launch import is_first_rank
from data_modules import printable, redact

MEANINGLESS_WARNINGS = (
    # Batches are made in the main process on purpose; the number of workers is a setting.
    ".*does not have many workers.*",
    # The loaders are ours: the data plan decides their length and epochs.
    ".*number of training batches.*smaller than the logging interval.*",
    ".*GPU available but not used.*",
    # No validation rows were requested, or a resumed run has no step left.
    ".*Total length of `.*` across ranks is zero.*",
    # Our loaders start at the checkpoint's step, by the data plan.
    ".*resuming from a checkpoint that ended before the epoch ended.*",
    # peft saves without a hub look-up; the base's name is in the manifest.
    ".*Could not find a config file in.*",
    # Our own error says the same.
    ".*adapter keys while loading.*",
    ".*not initialized from the model checkpoint.*",
    # Lightning runs the schedule after the optimizer; torch cannot see it through our optimizer.
    ".*lr_scheduler.step.*before.*optimizer.step.*",
    ".*LeafSpec.*is deprecated.*",
)


class CleanFormatter(logging.Formatter):
    """Log messages without secrets, and with control characters in names escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a log record."""
        return printable(redact(super().format(record)), keep="\n")


def quiet_libraries(*, offline: bool) -> None:
    """Set the environment and filters of this process; call before transformers is imported.

    `offline` forbids requests to the hub, which a local model does not need.
    """
    defaults = {
        # A waiting thread spins briefly, then sleeps: spinning on makes a step many times slower as
        # soon as anything else runs, and sleeping at once costs small models a third.
        "GOMP_SPINCOUNT": "1000",
        # oneDNN caches a kernel a shape of half-precision products. The default of 1024 can take a
        # small model as much memory as all the rest of it; too few would be compiled again.
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
    # Changes in a library's next version concern us, who pin the versions, not the user.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # Ranks above 0 only log warnings.
    logging.basicConfig(
        level=logging.INFO if is_first_rank() else logging.WARNING,
        stream=sys.stdout,
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.setFormatter(CleanFormatter("%(message)s"))
    for noisy in ("bitsandbytes", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
