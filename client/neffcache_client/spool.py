"""NEFFs that were compiled while the server could not be used, kept until they are uploaded.

    <tier_dir>/spool/<key>.<host>.<pid>.<random>.neff    hard link or copy of the artifact
    <tier_dir>/spool/<same>.json                         key, factors, figures, server and namespace

The JSON file is renamed into place last, after both files were synced, so an entry is whole or is not there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from neffcache_client import wire
from neffcache_client.errors import LocalTierError
from neffcache_client.local_tier import describe, remove_quietly, remove_stale, unique
from neffcache_client.neff import NeffInfo, check_neff


@dataclass(slots=True, kw_only=True)
class SpoolEntry:
    """One result that waits for its upload."""

    key: str
    factors: dict[str, Any] = field(default_factory=dict)
    compile_seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_rss_bytes: int | None = None
    url: str = ""
    namespace: str = "default"
    lease_id: str | None = None
    """The lease it was compiled under, if any: tried first, since it may still be good."""
    spooled_at: float = 0.0
    path: str = ""
    """Of the JSON file; not stored in it."""

    @property
    def neff(self) -> str:
        """Path of the NEFF."""
        return self.path[:-5] + ".neff"


class Spool:
    """The spool of one local folder."""

    def __init__(self, tier_dir: str) -> None:
        self.folder = os.path.join(tier_dir, "spool")

    def add(self, entry: SpoolEntry, neff: str, *, link: bool) -> None:
        """Keep `neff` for later, durably; with `link` as a hard link where that is possible.

        Link only what nobody changes in place. A key that waits already for that namespace is not added again. Raises
        LocalTierError.
        """
        wire.check_key(entry.key)
        if entry.namespace in self._waiting_in(entry.key):
            return
        entry.path = os.path.join(self.folder, unique(entry.key).removesuffix(".tmp") + ".json")
        entry.spooled_at = time.time()
        temp = entry.path + ".tmp"
        try:
            os.makedirs(self.folder, exist_ok=True)
            if not (link and _linked(neff, entry.neff)):
                shutil.copyfile(neff, entry.neff)
            _sync(entry.neff)
            with open(temp, "w", encoding="utf-8") as f:
                json.dump({k: v for k, v in asdict(entry).items() if k != "path"}, f)
            _sync(temp)
            os.replace(temp, entry.path)
            _sync(self.folder)
        except OSError as exc:
            for path in (temp, entry.path, entry.neff):
                remove_quietly(path)
            raise LocalTierError(f"the spool {self.folder} cannot take a NEFF: {describe(exc)}") from exc

    def pending(self) -> list[SpoolEntry]:
        """Entries that wait, oldest first. Unreadable ones are left out, what killed processes left is removed."""
        remove_stale(self._halves())
        found = [entry for name in self._names() if (entry := self._read(os.path.join(self.folder, name)))]
        return sorted(found, key=lambda e: e.spooled_at)

    def __len__(self) -> int:
        return len(self._names())

    def remove(self, entry: SpoolEntry) -> None:
        """Done with it, whether or not it was uploaded."""
        remove_quietly(entry.path)
        remove_quietly(entry.neff)

    def check(self, entry: SpoolEntry) -> NeffInfo:
        """What the entry's NEFF says of itself. Raises NeffInvalid when it is damaged, LocalTierError when gone."""
        try:
            return check_neff(entry.neff)
        except OSError as exc:
            raise LocalTierError(f"{entry.neff} cannot be read: {describe(exc)}") from exc

    def _waiting_in(self, key: str) -> list[str]:
        """The namespaces that a result of `key` waits for."""
        found = [self._read(os.path.join(self.folder, name)) for name in self._names() if name.startswith(key)]
        return [entry.namespace for entry in found if entry is not None and os.path.exists(entry.neff)]

    def _halves(self) -> list[str]:
        """Files of entries that are not whole."""
        whole = {name.removesuffix(".json") for name in self._names()}
        names = (n for n in self._listing() if n.endswith((".neff", ".json.tmp")))
        return [os.path.join(self.folder, n) for n in names if n.removesuffix(".neff") not in whole]

    def _names(self) -> list[str]:
        return [n for n in self._listing() if n.endswith(".json")]

    def _listing(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except OSError:
            return []

    def _read(self, path: str) -> SpoolEntry | None:
        try:
            with open(path, encoding="utf-8") as f:
                entry = wire.from_json(SpoolEntry, json.load(f))
            wire.check_key(entry.key)
        except (OSError, ValueError, TypeError):
            return None
        entry.path = path
        return entry


def _linked(source: str, target: str) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
