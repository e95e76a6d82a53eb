"""A URL to which alarms are posted: what it may be, and how it is sent without a secret in an error."""

import ipaddress
import os
import re
import urllib.request
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

_HOST = re.compile(r"[A-Za-z0-9._-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_KEPT = "/%:@!$&'()*+,;=~"
"""Characters that a path may have as they are; `%` begins an escape."""


class Webhook:
    """A URL that is sent as HTTP allows: odd letters are escaped.

    Args:
        url (`str`): with http or https.

    Raises:
        ValueError: it is no such URL. The message says why, and repeats nothing of it.
    """

    def __init__(self, url: object) -> None:
        if not isinstance(url, str):
            raise ValueError(f"it is of type {type(url).__name__}")
        text = url.strip()
        if _CONTROL.search(text):
            raise ValueError("it has a line end or another control character in it")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise ValueError("its host or port is none") from None
        if "@" in parts.netloc:  # a name and password there are read by each library in another way
            raise ValueError("it has a user or password, which a webhook has in its path")
        if "\\" in parts.netloc:  # readers of URLs differ about which host that is
            raise ValueError("it has a backslash in its host")
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError("it has no host, or port 0")
        self.host = _ascii_host(parts.hostname)
        """The host, which is no secret."""
        at = f"[{self.host}]" if ":" in self.host else self.host
        where = at if port is None else f"{at}:{port}"
        query = f"?{_escaped(parts.query, _KEPT + '?')}" if parts.query else ""
        self._url = f"{parts.scheme}://{where}{_escaped(parts.path, _KEPT)}{query}"
        self._headers = {"Content-Type": "application/json"}
        self._opener = urllib.request.build_opener(_NoRedirects)

    def post(self, content: bytes, timeout_s: float) -> None:
        """Send one JSON object.

        Args:
            content (`bytes`): the object.
            timeout_s (`float`): seconds that the receiver has to answer.

        Raises:
            ConnectionError: it was not taken. The message has nothing that may repeat the URL or its secrets.
        """
        try:
            request = urllib.request.Request(  # noqa: S310  the scheme was checked
                self._url, data=content, headers=self._headers, method="POST"
            )
            with self._opener.open(request, timeout=timeout_s):
                pass
        except Exception as error:
            raise ConnectionError(describe_failure(error)) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would turn the POST into a GET of another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


def describe_failure(error: BaseException) -> str:
    """Return the type of an error, with what cannot be secret: the status of an answer, or the number of the system.

    Errors of urllib repeat the URL and parts of it.

    Args:
        error (`BaseException`): why a request failed.
    """
    cause = error.reason if type(error) is URLError else error
    name = type(cause).__name__
    if isinstance(cause, HTTPError):
        return f"{name} {cause.code}"
    number = getattr(cause, "errno", None)
    if isinstance(cause, OSError) and isinstance(number, int) and number > 0:
        return f"{name} ({os.strerror(number)})"
    return name


def _ascii_host(host: str) -> str:
    if ":" in host:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise ValueError("its host is no IPv6 address") from None
    try:
        found = host.encode("idna").decode()
    except UnicodeError:
        raise ValueError("a name of its host is empty, longer than 63 letters, or none") from None
    if not _HOST.fullmatch(found):
        raise ValueError("its host has a character that no host has")
    return found


def _escaped(text: str, kept: str) -> str:
    try:
        return quote(_LONE_PERCENT.sub("%25", text), safe=kept)
    except UnicodeError:
        raise ValueError("it has a character that is none in UTF-8") from None
