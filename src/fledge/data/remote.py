"""Files by address: `s3://`, `hf://`, `https://` and whatever else fsspec has a package for.

They are read where they lie, some megabytes at a time: nothing of them is copied to the disk. The
packages of the protocols find their credentials themselves (environment, files of the user).
"""

import contextlib
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, MissingPackage, first_line
from fledge.core.expected import ListOf, Table, Text, Whole
from fledge.core.files import cache_dir, write_json
from fledge.core.reading import read_json

_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_REQUEST, _SURVEYED = 1 << 20, 1 << 23  # bytes asked for at a time: of a part, of a whole file
# Exceptions of protocols' packages that are no OSErrors: looked up where a package is loaded.
_FAILURES = (("aiohttp", "ClientError"), ("botocore.exceptions", "BotoCoreError"))
# What a store may say of a file that changes when its bytes do.
_VERSIONS = (
    *("ETag", "etag", "blob_id", "generation", "Digest", "Content-MD5", "content_md5", "md5Hash"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "created"),
)
_SURVEY = Table({"sha256": Text(64), "cuts": ListOf(ListOf(Whole(), least=3))})


@dataclass(frozen=True)
class Survey:
    """What one pass over a file tells."""

    sha256: str
    cuts: list[tuple[int, int, int]]  # first byte of a part, byte past its last, its first line


Cut = Callable[[io.BufferedReader], list[tuple[int, int, int]]]


def is_address(name: str) -> bool:
    return _ADDRESS.match(name) is not None


def public_name(address: str) -> str:
    """An address without what may be secret in it (a query, a user); another name as it is."""
    if not is_address(address):
        return address
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".partition("?")[0]


def list_files(address: str, suffixes: tuple[str, ...]) -> list[str]:
    """The file at an address, or the files of the directory that is there."""
    with _reached(address):
        system, path = _system(address)
        if public_name(address).endswith(suffixes):
            if not system.exists(path):
                raise BadInput("no such file", where=public_name(address))
            return [address]
        found = sorted(file for file in system.find(path) if file.endswith(suffixes))
    if not found:
        raise BadInput(f"no {', '.join(suffixes)} file", where=public_name(address))
    return [system.unstrip_protocol(file) for file in found]


@contextlib.contextmanager
def open_binary(name: str) -> Iterator[io.BufferedReader]:
    """A file on the disk or at an address, to be read from any byte on."""
    if not is_address(name):
        with Path(name).open("rb") as file:
            yield file
        return
    with _reached(name):
        system, path = _system(name)
        # A request is what our own buffer asks for; a cache below it would fetch beyond each part.
        with system.open(path, "rb", cache_type="none") as raw:
            yield io.BufferedReader(raw, _REQUEST)


@contextlib.contextmanager
def _reached(address: str) -> Iterator[None]:
    """What goes wrong on the way is one line."""
    modules = ((sys.modules.get(module), name) for module, name in _FAILURES)
    failures = [getattr(module, name) for module, name in modules if module is not None]
    try:
        yield
    except BadInput:
        raise
    except (OSError, *failures) as error:
        what = f"cannot be read ({type(error).__name__}: {first_line(error)[:120]})"
        fix = "check the address, your credentials and the network"
        raise BadInput(what, where=public_name(address), fix=fix) from None


def _system(address: str) -> tuple[Any, str]:
    """The file system that knows an address, and the path in it."""
    protocol, where = address.partition("://")[0], public_name(address)
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(address)
    except ImportError as error:  # fsspec says which package
        what = f"addresses of {protocol}:// need a package ({first_line(error)[:120]})"
        fix = "install it beside fledge, or name a local file"
        raise MissingPackage(what, where=where, fix=fix) from None
    except ValueError as error:
        what = f"not an address that can be read ({first_line(error)[:120]})"
        raise BadInput(what, where=where, fix="s3://, gs://, hf://, https://, ...") from None
    return system, path


class _Hashed(io.RawIOBase):
    """A file that is read from its beginning, and the digest of what has been read of it."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._file.readinto(buffer)
        self.sha256.update(memoryview(buffer)[:size])
        return size


def survey(address: str, cut: Cut, how: str) -> Survey:
    """The digest of a file and where it is cut, from one pass over it, which is made once for every
    version of the file: each rank and each start would read it all again. (A store that does not
    tell versions apart is asked again.) `how` it is cut says the same for the same `cut`."""
    known = _survey_path(address, how)
    if known is not None:
        with contextlib.suppress(BadInput):
            found = read_json(known, _SURVEY)
            return Survey(found["sha256"], [(at[0], at[1], at[2]) for at in found["cuts"]])
    with open_binary(address) as file:
        hashed = _Hashed(file)
        cuts = cut(io.BufferedReader(hashed, _SURVEYED))
        while hashed.readinto(bytearray(_SURVEYED)):
            pass  # to the end, wherever cutting ended
    made = Survey(hashed.sha256.hexdigest(), cuts)
    if known is not None:
        known.parent.mkdir(parents=True, exist_ok=True)
        write_json(known, {"sha256": made.sha256, "cuts": made.cuts})
    return made


def _survey_path(address: str, how: str) -> Path | None:
    """Where the survey of this version of a file is kept; None: there is no telling versions."""
    with _reached(address):
        system, path = _system(address)
        info = system.info(path)
    versions = {name: str(info[name]) for name in _VERSIONS if info.get(name)}
    if not versions:
        return None
    facts = json.dumps([public_name(address), how, info.get("size"), versions])
    return cache_dir() / "surveys" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
