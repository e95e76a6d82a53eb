"""One request to a cloud's metadata service: constant host, no proxy, no redirect, bounded in time and size."""

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

METADATA_URL = "http://169.254.169.254"
"""The link-local address of AWS, Azure and GCP alike (there also metadata.google.internal; a number needs no name
server, which can hang or lie)."""
MAX_BYTES = 64 * 1024
"""More than any answer that is asked for here; scheduled events of a large scale set are a few KiB."""


class MetadataError(Exception):
    """The service did not give a usable answer."""


@dataclass(frozen=True)
class Answer:
    """Status, text and headers (by lower-case names) of a response."""

    status: int
    text: str
    headers: Mapping[str, str]


class MetadataClient:
    """Asks one metadata service.

    `http.client` reads no proxy from the environment and follows no redirect.

    Args:
        base_url (`str`): scheme and host; tests name a server on loopback.
        timeout_s (`float`): for a whole request.
    """

    def __init__(self, base_url: str = METADATA_URL, *, timeout_s: float = 2.0) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.timeout_s = timeout_s

    def request(self, method: str, path: str, headers: Mapping[str, str], *, timeout_s: float | None = None) -> Answer:
        """The answer, whatever its status.

        Args:
            timeout_s (`float`, *optional*): another limit, for a request that waits for a change.

        Raises:
            MetadataError: no connection, no answer in time, too large an answer, a redirect, or not HTTP.
        """
        limit_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + limit_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            if 300 <= response.status < 400:
                raise MetadataError(f"{path} answered with a redirect ({response.status})")
            body = _read(response, connection, deadline)
            text = body.decode("utf-8")
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise MetadataError(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return Answer(response.status, text, {name.lower(): value for name, value in response.getheaders()})


def _read(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> bytes:
    """The body; a socket's timeout alone would let a server send a byte now and then for ever."""
    body = b""
    while chunk := response.read1(MAX_BYTES):
        body += chunk
        left = deadline - time.monotonic()
        if len(body) > MAX_BYTES:
            raise MetadataError(f"the answer is longer than {MAX_BYTES} bytes")
        if left <= 0:
            raise MetadataError("the answer did not end in time")
        if connection.sock is not None:
            connection.sock.settimeout(left)
    return body
