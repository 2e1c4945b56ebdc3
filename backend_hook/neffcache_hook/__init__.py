"""Inside the neuron compile backend: the compile key, the `neuronx-cc` launcher and the torch auto-load."""

from __future__ import annotations
