"""Small file systems of a test's own, to be filled up or made read-only. They need root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest


@cache
def _can_mount() -> bool:
    if os.geteuid() != 0:
        return False
    # In a name space of its own, so that nothing stays behind.
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def need_mounts() -> None:
    """Skip the test where file systems cannot be mounted."""
    if not _can_mount():
        pytest.skip("mounting a small file system needs root")


@contextmanager
def small_disk(folder: Path, size: str = "1m", inodes: int = 0) -> Iterator[Path]:
    """A file system of that size at `folder`."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full_folder(folder: Path, size: str = "1m") -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """A small disk with what fills it to the last byte, and what gives the room back."""
    with small_disk(folder, size) as disk:
        ballast = disk / "ballast"

        def fill() -> None:
            with ballast.open("wb", buffering=0) as f:
                try:
                    while True:
                        f.write(b"\0" * 4096)
                except OSError:
                    return

        yield disk, fill, lambda: ballast.unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Whatever is in `folder`, unwritable even for root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
