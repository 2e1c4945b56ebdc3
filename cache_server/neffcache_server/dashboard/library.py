"""The charting library, without the hook that it leaves in the import system."""

from __future__ import annotations

import sys
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ImportWarning)
    import pygal  # type: ignore[import-untyped]  # has no type information
    from pygal.etree import etree  # type: ignore[import-untyped]  # the same
    from pygal.style import Style  # type: ignore[import-untyped]  # the same

# It serves old map plug-ins, knows only the protocol of Python 2, and makes every later failing import of anybody a
# warning.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "PluginImportFixer"]

__all__ = ["Style", "etree", "pygal"]
