"""`neffcache demo`: a fleet of simulated ranks on this machine, with and without the cache.

The ranks are real processes that lower, compile and run real models; what is simulated is the compiler and
the chip (`neffcache_hook.cpu`) and the hosts (folders of their own on one machine).
"""

from __future__ import annotations
