"""Remote files by URL: `s3://`, `hf://`, `https://` and whatever else fsspec has a package for.

A file is copied to the cache once for each of its versions. The protocols' packages find
credentials themselves (environment, the user's configuration files).
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from fledge.core.errors import BadInput, MissingPackage, first_line
from fledge.core.files import cache_dir

_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# Metadata of a store that changes when the bytes of a file do.
_VERSIONS = (
    *("ETag", "etag", "blob_id", "generation", "Digest", "Content-MD5", "content_md5", "md5Hash"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "created", "size"),
)


def is_address(name: str) -> bool:
    return _ADDRESS.match(name) is not None


def public_name(address: str) -> str:
    """An address without its possibly secret parts (query, user); other names unchanged."""
    if not is_address(address):
        return address
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".partition("?")[0]


@contextlib.contextmanager
def _store(address: str) -> Iterator[tuple[Any, str]]:
    """The fsspec file system of an address, and the path in it. Errors of the network or the store
    become one BadInput."""
    from fsspec.core import url_to_fs

    where = public_name(address)
    try:
        yield url_to_fs(address)
    except BadInput:
        raise
    except ImportError as error:  # the message names the package
        what = f"such addresses need a package ({first_line(error)[:120]})"
        fix = "install it beside fledge, or name a local file"
        raise MissingPackage(what, where=where, fix=fix) from None
    except Exception as error:  # noqa: BLE001  (the stores' libraries share no base class)
        what = f"cannot be read ({type(error).__name__}: {first_line(error)[:120]})"
        fix = "check the address, your credentials and the network"
        raise BadInput(what, where=where, fix=fix) from None


def list_files(address: str, suffixes: tuple[str, ...]) -> list[str]:
    """The file at an address, or the files of a directory there."""
    if public_name(address).endswith(suffixes):
        return [address]
    with _store(address) as (system, path):
        files = sorted(file for file in system.find(path) if file.endswith(suffixes))
        return [system.unstrip_protocol(file) for file in files]


def local_copy(address: str) -> str:
    """The path of a copy of the file, in the version that the store reports."""
    name = public_name(address)
    with _store(address) as (system, path):
        info = system.info(path)
        version = [name, *(str(info.get(key)) for key in _VERSIONS)]
        key = hashlib.sha256(repr(version).encode()).hexdigest()[:24]
        copy = cache_dir() / "downloads" / key / PurePosixPath(name).name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(copy.parent / ".lock"):  # other ranks wait, then read
            if not copy.exists():
                unfinished = Path(f"{copy}.tmp")
                system.get_file(path, str(unfinished))
                unfinished.replace(copy)
    return str(copy)
