"""One simulated rank, in a process of its own: compile every model, take a first step, compare with eager."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from neffcache_hook import autoload, end_of_run
from neffcache_hook.cpu import backend, models
from neffcache_hook.demo.fleet import Scenario


def prepare() -> None:
    """In the parent, before any fork: threads started by torch would be missing in the children and hang them."""
    torch.set_num_threads(1)
    backend.preload()


def rank_main(scenario: Scenario, rank: int, gate: int) -> dict[str, Any]:
    """Wait for the common start, then run every model once through `torch.compile(backend="neuron")`."""
    autoload.activate()
    while os.read(gate, 1):
        pass
    started = time.monotonic()
    outputs = {}
    for name in scenario.models:
        outputs[name] = models.run(models.MODELS[name], "neuron")
    first_step = time.monotonic() - started
    # The demo ends its ranks by os._exit, and reports for all of them itself.
    end_of_run.finish(report=False)
    return {
        "rank": rank,
        "host": scenario.host_of(rank),
        "first_step_seconds": first_step,
        "graphs": [record.op_digest for record in backend.graph_log],
        "host_folder_hits": sum(record.from_folder for record in backend.graph_log),
        "lower_seconds": sum(record.lower_seconds for record in backend.graph_log),
        "obtain_seconds": sum(record.obtain_seconds for record in backend.graph_log),
        "max_abs_diff": max(
            models.max_abs_diff(outputs[name], models.run(models.MODELS[name], None)) for name in scenario.models
        ),
    }
