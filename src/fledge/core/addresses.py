"""Server addresses as users type them."""

from urllib.parse import SplitResult, urlsplit

from fledge.core.errors import BadInput


def server_address(url: str, *, where: str = "") -> SplitResult:
    """The parts of an http(s) address; anything else is refused with BadInput."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port  # parsed only on access
    except ValueError:  # http://[::1 or a port beyond 65535
        valid, port = False, None
    if not valid or port == 0:
        raise BadInput(f"'{url}' is not an address", where=where, fix="http://host:port")
    return parts
