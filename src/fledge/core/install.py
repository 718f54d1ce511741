"""How this fledge was installed, and so what a person types to call it or to add to it.

Whoever prints a command to type asks here: a virtual environment may be activated or not, and
extras come from a checkout, a repository or an index.
"""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAME = "fledge"


def fledge_command(*words: str | os.PathLike[str]) -> str:
    """A command line of this fledge: `fledge chat runs/x`, or `.venv/bin/fledge chat runs/x` where
    another `fledge`, or none, would be found."""
    own = [Path(sysconfig.get_path("scripts", scheme)) / _NAME for scheme in _schemes()]
    script = next((path for path in own if path.is_file()), None)
    if script is None:
        call = [_typed(Path(sys.executable)), "-m", _NAME]
    else:
        found = shutil.which(_NAME)  # a link to ours is ours, too
        same = found is not None and os.path.samefile(found, script)
        call = [_NAME if same else _shown(script)]
    return shlex.join([*call, *(os.fspath(word) for word in words)])


def install_extra(extra: str) -> str:
    """The line that adds an extra to this installation: `pip install 'fledge[serve]'`."""
    words = [_NAME] if (place := checkout()) is None else ["-e", _shown(place)]
    source = _direct_url() if place is None else None
    if source is not None:
        url, version_control = source
        path = Path(unquote(urlsplit(url).path))
        if version_control:  # the extra belongs to the name, which stands before the address
            return install_packages(f"{_NAME}[{extra}] @ {version_control}+{url}")
        if url.startswith("file:") and path.exists():
            words = [_shown(path)]
    return install_packages(*words[:-1], f"{words[-1]}[{extra}]")


def install_packages(*words: str) -> str:
    """The line that installs packages where this interpreter finds them."""
    python = Path(sys.executable)
    pip = python.with_name("pip")
    if pip.is_file():
        call = [_typed(pip)]
    elif util.find_spec("pip") is None and shutil.which("uv"):  # uv's environments have no pip
        return shlex.join(["uv", "pip", "install", "--python", _shown(python), *words])
    else:
        call = [_typed(python), "-m", "pip"]
    return shlex.join([*call, "install", *words])


def checkout() -> Path | None:
    """The source tree that this fledge runs from (an editable install, or PYTHONPATH); None for
    one that was copied into an environment."""
    root = Path(__file__).parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "src").is_dir() else None


def _schemes() -> list[str]:
    """Where pip may have put the command: this environment, or the user's own."""
    return [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]


def _direct_url() -> tuple[str, str] | None:
    """What was installed instead of an index's: its URL, and the version control system, if any."""
    try:
        text = metadata.distribution(_NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    if text is None:
        return None
    noted = json.loads(text)
    return str(noted["url"]), str(noted.get("vcs_info", {}).get("vcs", ""))


def _typed(program: Path) -> str:
    """The program's name where the shell finds this very one, else its path. By directory, not by
    file: the interpreters of two environments are often links to one file."""
    found = shutil.which(program.name)
    same = found is not None and Path(found).absolute().parent == program.absolute().parent
    return program.name if same else _shown(program)


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
