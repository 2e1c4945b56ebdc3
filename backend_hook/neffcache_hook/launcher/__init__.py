"""The `neuronx-cc` that ranks find first on PATH: answers from the cache, compiles when it must.

`main` is the path of a local hit and imports next to nothing; `compile` and what it uses is loaded on a miss.
"""

from __future__ import annotations
