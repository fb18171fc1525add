"""Run `app.train` on ranks whose exchange of split rows loses the boundaries of documents."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import app.run.ranks
from app.model.attention import exchange
from common.installation import child_command

MODULE = "tests.parity.strategies.leaking_ranks"


def exchanging(attend: exchange.Attend, exact: Any = exchange.exchanging) -> exchange.Attend:
    """Return the function for split rows, in which tokens see the documents before theirs."""
    run = exact(attend)

    def leak(*args: Any, **options: Any) -> Any:
        if options.get("exchange") is not None:
            options["documents"] = None
        return run(*args, **options)

    return leak


if __name__ == "__main__":
    exchange.exchanging = exchanging
    app.run.ranks.child_command = lambda _: child_command(MODULE)
    sys.modules.pop("app.train", None)  # it becomes __main__
    runpy.run_module("app.train", run_name="__main__", alter_sys=True)
