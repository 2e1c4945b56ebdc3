"""Where the compiler writes before anybody else sees its output.

A compiler that is killed leaves half a file, and the caller takes any file that is there. So the compiler writes
under the output's own base name into a private folder beside it, and only a finished, verified file is renamed
to the output.
"""

from __future__ import annotations

import os
import shutil
import tempfile

_PREFIX = ".neffcache-"


class PrivateFolder:
    """A folder of this process for one output. Raises OSError when no folder can be made anywhere."""

    def __init__(self, output: str) -> None:
        self._target = os.path.dirname(output)
        base = os.path.basename(output)
        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=self._target or os.curdir)
        except OSError:
            # The file itself may be writable although its folder is not.
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
        if not os.path.isabs(output) and self._same_place():
            # A relative path stays one: the compiler may write it into the NEFF.
            self.path = os.path.join(self._target, os.path.basename(self.path))
        self.file = os.path.join(self.path, base)

    def hand_over_rest(self) -> None:
        """Move what else the compiler left beside its output to where it would have been without us."""
        for name in _names(self.path):
            source = os.path.join(self.path, name)
            if source != self.file:
                try:
                    os.replace(source, os.path.join(self._target, name))
                except OSError:
                    continue

    def remove(self) -> None:
        """Remove the folder and what is in it. Never raises."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _same_place(self) -> bool:
        return os.path.realpath(os.path.dirname(self.path)) == os.path.realpath(self._target or os.curdir)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
