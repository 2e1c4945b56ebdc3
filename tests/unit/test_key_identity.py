"""Which compiler it is."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from pathlib import Path

import pytest
from neffcache_hook.key.identity import IdentityUnknown, identify

VERSION = "2.23.6484.0+3b612583"


def script(path: Path, body: str, interpreter: str = "/bin/sh") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{body}")
    path.chmod(0o755)
    return path


def install(prefix: Path, version: str = VERSION, content: str = "aaaa", python: str = "python3.12") -> Path:
    """A venv with the compiler's wheel in it, as pip leaves it; the program must not be run."""
    program = script(prefix / "bin" / "neuronx-cc", "exit 99\n", f"{prefix}/bin/{python}")
    site = prefix / "lib" / python / "site-packages"
    info = site / f"neuronx_cc-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: neuronx-cc\nVersion: {version}\n\nVersion: 0\n")
    own = base64.urlsafe_b64encode(hashlib.sha256(program.read_bytes()).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(
        f"../../../bin/neuronx-cc,sha256={own},{program.stat().st_size}\n"
        f"neuronxcc/__init__.py,sha256={content},10\n"
        f"neuronxcc/__pycache__/__init__.cpython-312.pyc,,\n"
        f"{info.name}/INSTALLER,sha256={prefix.name},4\n"
        f"{info.name}/RECORD,,\n"
    )
    return program


def test_a_wheel_is_identified_without_running_it(tmp_path: Path) -> None:
    found = identify(str(install(tmp_path / "venv")), str(tmp_path / "cache"))
    assert (found.version, found.kind) == (VERSION, "wheel")
    assert len(found.text) == 16
    assert not (tmp_path / "cache").exists()


def test_one_compiler_in_two_environments_is_one_identity(tmp_path: Path) -> None:
    """UC-05: venv foo and venv bar share."""
    foo, bar = install(tmp_path / "foo_venv"), install(tmp_path / "bar", python="python3.10")
    assert identify(str(foo), "").digest == identify(str(bar), "").digest


def test_an_upgrade_in_place_with_the_same_path_and_mtime_is_another_compiler(tmp_path: Path) -> None:
    """UC-12: RECORD tells, though version, path and times stay."""
    program = install(tmp_path / "venv")
    before = identify(str(program), "")
    times = (1_000_000_000, 1_000_000_000)
    install(tmp_path / "venv", content="bbbb")
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            os.utime(os.path.join(folder, name), times)
    after = identify(str(program), "")
    assert after.version == before.version
    assert (after.digest, after.text) != (before.digest, before.text)


def test_the_git_suffix_is_part_of_the_version(tmp_path: Path) -> None:
    """UC-12"""
    one = identify(str(install(tmp_path / "a")), "")
    other = identify(str(install(tmp_path / "b", version="2.23.6484.0+deadbeef")), "")
    assert one.text != other.text


def test_a_program_that_replaced_the_wheels_own_is_part_of_the_identity(tmp_path: Path) -> None:
    program = install(tmp_path / "venv")
    before = identify(str(program), "")
    script(program, "exit 98\n")
    assert identify(str(program), "").digest != before.digest


def test_a_link_to_the_wheels_program_is_the_same_compiler(tmp_path: Path) -> None:
    program = install(tmp_path / "venv")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "neuronx-cc").symlink_to(program)
    assert identify(str(tmp_path / "bin" / "neuronx-cc"), "").text == identify(str(program), "").text


def counting(path: Path, version: str, comment: str = "") -> Path:
    return script(path, f'echo x >> "{path}.runs"\necho "NeuronX Compiler version {version}"\n# {comment}\n')


def runs(path: Path) -> int:
    log = Path(f"{path}.runs")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_another_executable_is_asked_once_and_then_known_by_its_content(tmp_path: Path) -> None:
    program = counting(tmp_path / "x" / "neuronx-cc", "3.0.1+cpu")
    first = identify(str(program), str(tmp_path / "cache"))
    second = identify(str(program), str(tmp_path / "cache"))
    assert (first.version, first.kind) == ("3.0.1+cpu", "executable")
    assert second.text == first.text
    assert runs(program) == 1


def test_an_executable_changed_in_place_is_another_compiler(tmp_path: Path) -> None:
    """UC-12: the same path, size and mtime."""
    program = counting(tmp_path / "neuronx-cc", "3.0.1", "a")
    os.utime(program, (1, 1))
    before = identify(str(program), str(tmp_path / "cache"))
    counting(program, "3.0.1", "b")
    os.utime(program, (1, 1))
    assert identify(str(program), str(tmp_path / "cache")).text != before.text


def test_a_package_upgraded_beside_a_script_makes_it_asked_again(tmp_path: Path) -> None:
    """A script only starts what is installed beside it; what it prints decides."""
    program = counting(tmp_path / "venv" / "bin" / "neuronx-cc", "3.0.1")
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    (site / "backend-1.0.dist-info").mkdir(parents=True)
    before = identify(str(program), str(tmp_path / "cache"))
    (site / "backend-1.0.dist-info").rename(site / "backend-1.1.dist-info")
    after = identify(str(program), str(tmp_path / "cache"))
    assert runs(program) == 2
    assert after.text == before.text


def test_a_damaged_note_of_the_version_is_ignored(tmp_path: Path) -> None:
    program = counting(tmp_path / "neuronx-cc", "3.0.1")
    before = identify(str(program), str(tmp_path / "cache"))
    (note,) = (tmp_path / "cache").glob("version-*.txt")
    note.write_text("NeuronX Compiler version 9.9")
    assert identify(str(program), str(tmp_path / "cache")).text == before.text
    assert runs(program) == 2


def test_a_cache_folder_that_cannot_be_written_only_costs_another_run(tmp_path: Path) -> None:
    program = counting(tmp_path / "neuronx-cc", "3.0.1")
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert identify(str(program), str(blocked / "cache")).version == "3.0.1"


@pytest.mark.parametrize("body", ["exit 3\n", "exit 0\n"])
def test_a_compiler_that_tells_no_version_has_no_identity(tmp_path: Path, body: str) -> None:
    program = script(tmp_path / "neuronx-cc", body)
    with pytest.raises(IdentityUnknown, match="--version"):
        identify(str(program), str(tmp_path / "cache"))


def test_a_compiler_that_is_gone_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(IdentityUnknown, match="cannot read"):
        identify(str(tmp_path / "neuronx-cc"), str(tmp_path / "cache"))


def test_the_launcher_behind_the_version_question_passes_through(tmp_path: Path) -> None:
    program = script(tmp_path / "neuronx-cc", 'echo "inner=$NEFFCACHE_INNER 1.2.3"\n')
    assert identify(str(program), str(tmp_path / "cache")).version == "1.2.3"
    (note,) = (tmp_path / "cache").glob("version-*.txt")
    assert "inner=1" in note.read_text()
    assert stat.S_ISREG(note.stat().st_mode)


@pytest.fixture
def python_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on PYTHONPATH, where Python looks before it looks into a venv."""
    folder = tmp_path / "nightly"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/nothing{os.pathsep}{folder}")
    return folder


def test_a_wheel_on_pythonpath_is_the_compiler_that_runs(tmp_path: Path, python_path: Path) -> None:
    """UC-12: a nightly build laid over the image's compiler."""
    program = install(tmp_path / "venv")
    before = identify(str(program), "")
    other = install(tmp_path / "other", version="2.24.1.0+99999999", content="nightly")
    site = next((tmp_path / "other" / "lib").glob("*/site-packages"))
    for item in site.iterdir():
        item.rename(python_path / item.name)
    other.unlink()
    after = identify(str(program), "")
    assert after.version == "2.24.1.0+99999999"
    assert after.digest != before.digest


def test_a_compiler_on_pythonpath_that_nothing_describes_has_no_identity(tmp_path: Path, python_path: Path) -> None:
    """A checkout changes from one minute to the next: in doubt nothing is cached."""
    program = install(tmp_path / "venv")
    (python_path / "neuronxcc").mkdir()
    with pytest.raises(IdentityUnknown, match="neuronxcc"):
        identify(str(program), "")


def test_other_folders_on_pythonpath_change_nothing(tmp_path: Path, python_path: Path) -> None:
    program = install(tmp_path / "venv")
    (python_path / "mycode").mkdir()
    with_path = identify(str(program), "").text
    os.environ.pop("PYTHONPATH")
    assert identify(str(program), "").text == with_path


@pytest.mark.parametrize("venv", [False, True])
def test_a_wheel_in_the_users_own_folder_goes_before_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, venv: bool
) -> None:
    """`pip install --user` over an image's compiler; a venv does not look there."""
    program = install(tmp_path / "usr")
    if venv:
        (tmp_path / "usr" / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    before = identify(str(program), "")
    install(tmp_path / "user", version="2.24.1.0+99999999", content="mine")
    after = identify(str(program), "")
    assert (after.version == before.version) == venv
    assert (after.digest == before.digest) == venv


def telling(path: Path, version: str) -> Path:
    """A program that tells `version` and notes that it was asked."""
    return script(path, f'echo asked >> "{path}.asked"\necho "compiler {version}"\n')


def test_the_program_behind_a_script_is_asked_again_when_it_changes(tmp_path: Path) -> None:
    """UC-12: /opt/bin/neuronx-cc that starts another one, which an upgrade replaces in place."""
    inner = telling(tmp_path / "opt" / "real-cc", "2.1.0+aa")
    wrapper = script(tmp_path / "bin" / "neuronx-cc", f'exec "{inner}" "$@"\n')
    cache = str(tmp_path / "cache")
    assert identify(str(wrapper), cache).version == "2.1.0+aa"
    assert identify(str(wrapper), cache).version == "2.1.0+aa"
    assert Path(f"{inner}.asked").read_text().count("asked") == 1
    times = os.stat(inner)
    telling(inner, "2.2.0+bb")
    os.utime(inner, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identify(str(wrapper), cache).version == "2.2.0+bb"


def test_a_wheel_upgraded_behind_a_script_makes_it_asked_again(tmp_path: Path) -> None:
    """The inner program of a wheel stays byte for byte what it was."""
    inner = telling(tmp_path / "opt" / "bin" / "real-cc", "2.1.0+aa")
    site = tmp_path / "opt" / "lib" / "python3.12" / "site-packages"
    (site / "neuronx_cc-2.1.0.dist-info").mkdir(parents=True)
    wrapper = script(tmp_path / "bin" / "neuronx-cc", f"exec {inner} $@\n")
    cache = str(tmp_path / "cache")
    identify(str(wrapper), cache)
    (site / "neuronx_cc-2.1.0.dist-info").rename(site / "neuronx_cc-2.2.0.dist-info")
    identify(str(wrapper), cache)
    assert Path(f"{inner}.asked").read_text().count("asked") == 2


def test_the_interpreter_that_env_finds_is_where_the_wheel_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`#!/usr/bin/env python3`: another venv first on PATH is another compiler."""
    tool = script(tmp_path / "tools" / "neuronx-cc", "exit 99\n", "/usr/bin/env -S python3")
    found = []
    for name, content in (("a", "aaaa"), ("b", "bbbb")):
        install(tmp_path / name, content=content)
        script(tmp_path / name / "bin" / "python3", "exit 99\n")
        monkeypatch.setenv("PATH", f"{tmp_path / name / 'bin'}{os.pathsep}/usr/bin")
        found.append(identify(str(tool), ""))
    assert [one.kind for one in found] == ["wheel", "wheel"]
    assert found[0].digest != found[1].digest


def test_a_lock_that_cannot_be_had_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without flock says so at once, every time."""
    import fcntl

    tries = []

    def refuse(fd: int, how: int) -> None:
        tries.append(fd)
        assert len(tries) == 1, "waits for a lock that does not exist"
        raise OSError(37, "No locks available")

    program = telling(tmp_path / "bin" / "neuronx-cc", "2.1.0+aa")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert identify(str(program), str(tmp_path / "cache")).version == "2.1.0+aa"
    assert len(tries) == 1
