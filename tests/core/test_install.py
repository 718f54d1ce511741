"""Suggested commands work as shown: environment activated or not, from a checkout or an index."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fledge.core import install
from fledge.core.install import fledge_command, install_extra

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with `python`, `pip` and `fledge`, below the working directory, that
    nobody has activated."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "pip", "fledge"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return programs


def activate(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def test_the_command_has_its_path_unless_it_is_on_the_search_path(environment, monkeypatch):
    assert fledge_command("chat", Path("my runs/x")) == ".venv/bin/fledge chat 'my runs/x'"
    activate(environment, monkeypatch)
    assert fledge_command("report", "runs/x") == "fledge report runs/x"


def test_another_fledge_on_the_path_is_not_ours_but_a_link_to_ours_is(environment, monkeypatch):
    other = environment.parents[1] / "other"
    other.mkdir()
    (other / "fledge").write_text("#!/bin/sh\n")
    (other / "fledge").chmod(0o755)
    activate(other, monkeypatch)
    assert fledge_command() == ".venv/bin/fledge"
    (other / "fledge").unlink()
    (other / "fledge").symlink_to(environment / "fledge")  # as pipx does
    assert fledge_command() == "fledge"


def test_without_a_script_the_command_is_python_m_fledge(environment):
    (environment / "fledge").unlink()
    assert fledge_command("doctor") == ".venv/bin/python -m fledge doctor"


def test_extras_are_installed_from_the_checkout_or_by_name(environment, monkeypatch):
    monkeypatch.setattr(install, "checkout", lambda: environment.parents[1])
    assert install_extra("serve") == ".venv/bin/python -m pip install -e '.[serve]'"
    monkeypatch.setattr(install, "checkout", lambda: None)
    assert install_extra("serve") == ".venv/bin/python -m pip install 'fledge[serve]'"


def test_the_suggested_commands_run_in_this_environment():
    """With this interpreter: `fledge` runs."""
    assert install.checkout() == ROOT
    version = shlex.split(f"{fledge_command()} --version")
    assert subprocess.run(version, capture_output=True, text=True).stdout.startswith("fledge ")
