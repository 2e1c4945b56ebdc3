"""The summary of the graph at hand, for a miss."""

from __future__ import annotations

import os

from neffcache_client.graph_summary import MAX_OPS, GraphSummary, encode

from neffcache_hook.launcher.main import Job


def summarise(job: Job) -> str | None:
    """The encoded summary of the job's graph, None for one that no parser reads. Never raises."""
    computed = job.computed
    if computed is None or job.cmd.input is None or not computed.about.get("ops"):
        return None
    counts = computed.about["ops"]
    if sum(counts.values()) > MAX_OPS:
        # Single operations would not be sent anyway: spare the parser.
        return encode(GraphSummary(computed.factors["ir"]["kind"], counts))
    from neffcache_hook.key import spawn

    try:
        fd = os.open(job.cmd.input, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return spawn.summarise(fd)
    finally:
        os.close(fd)
