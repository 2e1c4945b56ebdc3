"""A compile stack that runs anywhere, standing in for TorchNeuron and neuronx-cc where there is no Trainium.

It is a stand-in and says so: the NEFFs it makes run on this machine's CPU only, and its compiler version ends in
`+cpustandin.<machine>`. Nothing here is imported by the launcher or by `import torch`.
"""

from __future__ import annotations
