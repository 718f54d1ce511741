"""Addresses of servers, as people type them."""

from urllib.parse import SplitResult, urlsplit

from fledge.core.errors import BadInput


def server_address(url: str, *, where: str = "") -> SplitResult:
    """The parts of an http(s) address, or one line that says that it is not one."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port  # looked at only when it is asked for
    except ValueError:  # http://[::1 or a port beyond 65535
        known, port = False, None
    if not known or port == 0:
        raise BadInput(f"'{url}' is not an address", where=where, fix="http://host:port")
    return parts
