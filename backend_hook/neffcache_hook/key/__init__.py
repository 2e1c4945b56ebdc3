"""The compile key: what a compile is, told from the bytes and options that the compiler will read.

`command` parses the command line, `identity` tells which compiler it is, `compute` turns both into a key.
These are on the launcher's path of a local hit and import nothing heavy; `ir` and what it leads to (`mlir`,
`hlo`) are imported only by the worker process that runs when the local index does not know the graph.
"""

from __future__ import annotations
