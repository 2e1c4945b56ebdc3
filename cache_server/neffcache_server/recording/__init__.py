"""What became of each request: recorded behind the answer, summed by hour, day and job."""

from __future__ import annotations
