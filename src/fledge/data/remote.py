"""Remote files by URL: `s3://`, `hf://`, `https://` and whatever else fsspec has a package for.

They are streamed, some megabytes at a time, and never copied to disk. The protocols' packages find
credentials themselves (environment, the user's configuration files).
"""

import contextlib
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, MissingPackage, first_line
from fledge.core.files import cache_dir, write_json
from fledge.core.reading import ListOf, Table, Text, Whole, read_json

_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_REQUEST, _SURVEYED = 1 << 20, 1 << 23  # bytes per request: for a part, for a whole file
# Exceptions of the protocols' packages that are not OSErrors, looked up if a package is loaded.
_FAILURES = (("aiohttp", "ClientError"), ("botocore.exceptions", "BotoCoreError"))
# Metadata of a store that changes when the bytes of a file do.
_VERSIONS = (
    *("ETag", "etag", "blob_id", "generation", "Digest", "Content-MD5", "content_md5", "md5Hash"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "created"),
)
_SURVEY = Table({"sha256": Text(64), "cuts": ListOf(ListOf(Whole(), least=3))})

Cuts = list[tuple[int, int, int]]  # first byte of a part, byte past its last, its first line


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

    protocol, where = address.partition("://")[0], public_name(address)
    try:
        try:
            found = url_to_fs(address)
        except ImportError as error:  # the message names the package
            what = f"addresses of {protocol}:// need a package ({first_line(error)[:120]})"
            fix = "install it beside fledge, or name a local file"
            raise MissingPackage(what, where=where, fix=fix) from None
        except ValueError as error:
            what = f"not an address that can be read ({first_line(error)[:120]})"
            raise BadInput(what, where=where, fix="s3://, gs://, hf://, https://, ...") from None
        yield found
    except BadInput:
        raise
    except Exception as error:  # the stores' libraries share no base class; others pass on
        loaded = ((sys.modules.get(module), name) for module, name in _FAILURES)
        failures = tuple(getattr(module, name) for module, name in loaded if module is not None)
        if not isinstance(error, (OSError, *failures)):
            raise
        what = f"cannot be read ({type(error).__name__}: {first_line(error)[:120]})"
        fix = "check the address, your credentials and the network"
        raise BadInput(what, where=where, fix=fix) from None


def list_files(address: str, suffixes: tuple[str, ...]) -> list[str]:
    """The file at an address, or the files of a directory there."""
    with _store(address) as (system, path):
        if public_name(address).endswith(suffixes):
            if not system.exists(path):
                raise BadInput("no such file", where=public_name(address))
            return [address]
        files = sorted(file for file in system.find(path) if file.endswith(suffixes))
    if not files:
        raise BadInput(f"no {', '.join(suffixes)} file", where=public_name(address))
    return [system.unstrip_protocol(file) for file in files]


@contextlib.contextmanager
def open_binary(name: str) -> Iterator[io.BufferedReader]:
    """Open a local or remote file for reading, from any offset."""
    if not is_address(name):
        with Path(name).open("rb") as file:
            yield file
        return
    # Our buffer determines the requests; a cache below it would fetch beyond each part.
    with _store(name) as (system, path), system.open(path, "rb", cache_type="none") as raw:
        yield io.BufferedReader(raw, _REQUEST)


class _Hashed(io.RawIOBase):
    """A file read from its beginning, with a digest of what has been read so far."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._file.readinto(buffer)
        self.sha256.update(memoryview(buffer)[:size])
        return size


def survey(address: str, cut: Callable[[io.BufferedReader], Cuts], how: str) -> tuple[str, Cuts]:
    """The SHA-256 of a file and where it is cut, from one pass over it.

    The result is cached for each version of the file that the store reports, since otherwise every
    rank and every start would read it all again. `how` identifies `cut` in the cache.
    """
    with _store(address) as (system, path):
        info = system.info(path)
    versions = {name: str(info[name]) for name in _VERSIONS if info.get(name)}
    facts = json.dumps([public_name(address), how, info.get("size"), versions])
    cached = cache_dir() / "surveys" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
    if versions:
        with contextlib.suppress(BadInput):
            stored = read_json(cached, _SURVEY)
            return stored["sha256"], [(at[0], at[1], at[2]) for at in stored["cuts"]]
    with open_binary(address) as file:
        hashed = _Hashed(file)
        cuts = cut(io.BufferedReader(hashed, _SURVEYED))
        while hashed.readinto(bytearray(_SURVEYED)):
            pass  # hash the rest of the file
    sha256 = hashed.sha256.hexdigest()
    if versions:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, {"sha256": sha256, "cuts": cuts})
    return sha256, cuts
