"""Preemption notices of AWS, GCP and Azure, polled from the machine's metadata service by a thread.

| cloud | request | answer | notice |
|---|---|---|---|
| aws | `/latest/meta-data/spot/instance-action` (IMDSv2), every 5 s | 404, or `{"action", "time"}` | 120 s |
| gcp | `/computeMetadata/v1/instance/preempted?wait_for_change=true` | `FALSE`, `TRUE` | 30 s |
| azure | `/metadata/scheduledevents`, every 2 s | events, each with its machines and `NotBefore` | 30 s or more |

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

A service is polled only on a machine of its cloud, which the firmware (DMI) identifies, or if its cloud is selected
explicitly.
"""

import http.client
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from hfscale.checkpoint.preemption.notice import AWS, AZURE, GCP, NOTICES, Notice, PreemptionNotices
from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled_value
from hfscale.core.text_files import parse_json
from hfscale.errors import ParameterError, UsageError

logger = get_logger(__name__)

DMI = Path("/sys/class/dmi/id")
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis asset tag of every Azure machine; other Hyper-V machines have the same vendor, but not this tag."""
OVERRIDE = "HFSCALE_CLOUD"
METADATA_URL = "http://169.254.169.254"
"""The link-local address of AWS, Azure and GCP (there also metadata.google.internal; an address needs no name server,
which can hang or give a wrong answer)."""
MAX_BYTES = 64 * 1024
"""More than any expected answer; scheduled events of a large scale set are a few KiB."""
_FAILURES_BEFORE_A_WARNING = 3
# Less than the shortest notice, so that a service that works again is read in time
_LONGEST_PAUSE_S = 20.0


class MetadataError(Exception):
    """The metadata service did not give a usable answer."""


@dataclass(frozen=True)
class Answer:
    """A response of the metadata service."""

    status: int
    """HTTP status code."""
    text: str
    """Body, decoded as UTF-8."""
    headers: Mapping[str, str]
    """Header values by lower-case name."""


class MetadataClient:
    """Sends requests to a metadata service: a constant host, no proxy, no redirects, limits of time and size.

    `http.client` reads no proxy from the environment and follows no redirects.

    Args:
        base_url (`str`): scheme and host; tests use a server on loopback.
        timeout_s (`float`): seconds for a complete request.
    """

    def __init__(self, base_url: str = METADATA_URL, *, timeout_s: float = 2.0) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self.timeout_s = timeout_s

    def request(
        self, method: str, path: str, headers: Mapping[str, str], *, timeout_s: float | None = None
    ) -> Answer:
        """Send a request and return the answer.

        Args:
            method (`str`): the HTTP method.
            path (`str`): path and query.
            headers (`Mapping[str, str]`): the request's headers.
            timeout_s (`float`, *optional*): seconds for this request, if it waits for a change; by default the limit
                of the client.

        Returns:
            `Answer`: the answer, with any status other than a redirect.

        Raises:
            MetadataError: there was no connection or no complete answer in time, or the answer is a redirect, longer
                than `MAX_BYTES`, not UTF-8 or not HTTP.
        """
        limit_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + limit_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            if 300 <= response.status < 400:
                raise MetadataError(f"{path} answered with a redirect ({response.status})")
            body = _read_body(response, connection, deadline)
            text = body.decode("utf-8")
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise MetadataError(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return Answer(
            response.status, text, {name.lower(): value for name, value in response.getheaders()}
        )


def _read_body(
    response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float
) -> bytes:
    """Read the body until `deadline`: with the socket's timeout alone a server could send single bytes without end."""
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


class CloudWatch(Protocol):
    """Reads the notices of one cloud."""

    source: str
    """Source of its notices, one of `hfscale.checkpoint.preemption.SOURCES`."""
    every_s: float
    """Seconds between two polls."""

    def poll(self) -> Notice | None:
        """Return the current notice, or None if there is none.

        Raises:
            MetadataError: the service did not give a usable answer. A ValueError, KeyError or TypeError is also
                possible, if the answer has another form than expected.
        """

    def hinted(self) -> bool:
        """Return whether the cloud announces that a notice is likely. Raises the same errors as `poll`."""


class AwsWatch:
    """Reads EC2 spot interruptions, and the rebalance recommendation that can precede them. IMDSv2 only."""

    source = AWS
    every_s = 5.0

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._token: str | None = None
        self._was_hinted = False

    def poll(self) -> Notice | None:
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer is None:
            return None
        ends = datetime.fromisoformat(parse_json(answer.text)["time"])
        return Notice(source=self.source, seconds=_seconds_until(ends, answer))

    def hinted(self) -> bool:
        """Return True at the first poll that finds a rebalance recommendation, and False at all later ones."""
        if self._was_hinted:
            return False
        self._was_hinted = (
            self._get("/latest/meta-data/events/recommendations/rebalance") is not None
        )
        return self._was_hinted

    def _get(self, path: str) -> Answer | None:
        """Return the answer, or None for status 404. A refused token is replaced once."""
        for _ in range(2):
            if self._token is None:
                self._token = self._new_token()
            answer = self._client.request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                return None if answer.status == 404 else _checked(answer, path)
            self._token = None
        raise MetadataError(f"{path}: a new token was refused too")

    def _new_token(self) -> str:
        path = "/latest/api/token"
        try:
            answer = self._client.request(
                "PUT", path, {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            )
        except MetadataError as error:
            raise MetadataError(
                f"{error} (in a container the instance needs a metadata hop limit of 2)"
            ) from error
        token = _checked(answer, path).text
        if not token.isascii() or not token.isprintable():
            raise MetadataError(f"{path}: the answer is not a token")
        return token


class GcpWatch:
    """Reads Compute Engine preemptions, with a request that the server answers when the value changes."""

    source = GCP
    every_s = 0.0
    wait_s = 30.0
    """Seconds after which the server is asked to answer even without a change."""
    notice_s = 30.0
    """Seconds between the notice and the end."""

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._etag = "0"  # matches no value, so that the first answer comes at once

    def poll(self) -> Notice | None:
        """Wait up to `wait_s` seconds for a change, and return the current notice, or None if there is none."""
        path = (
            "/computeMetadata/v1/instance/preempted"
            f"?wait_for_change=true&timeout_sec={self.wait_s:.0f}&last_etag={self._etag}"
        )
        limit_s = self.wait_s + self._client.timeout_s
        answer = self._client.request("GET", path, {"Metadata-Flavor": "Google"}, timeout_s=limit_s)
        value = _checked(answer, path).text.strip()
        if answer.headers.get("metadata-flavor") != "Google" or value not in ("TRUE", "FALSE"):
            raise MetadataError("the answer does not come from Google's metadata service")
        etag = answer.headers.get("etag", "")
        if not etag.isalnum():
            raise MetadataError("the answer has no ETag, so the next change cannot be waited for")
        self._etag = etag
        return Notice(source=self.source, seconds=self.notice_s) if value == "TRUE" else None

    def hinted(self) -> bool:
        return False


class AzureWatch:
    """Reads Azure's scheduled events of this machine: spot evictions and deletions by a scale set."""

    source = AZURE
    every_s = 2.0
    ending = ("Preempt", "Terminate")

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._name: str | None = None

    def poll(self) -> Notice | None:
        """Return a notice with the time of the earliest event that ends this machine, or None if there is none."""
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._get(path).text.strip().lower()
        answer = self._get("/metadata/scheduledevents?api-version=2020-07-01")
        ends = [
            _seconds_left(event, answer)
            for event in parse_json(answer.text)["Events"]
            if self._concerns_us(event)
        ]
        return Notice(source=self.source, seconds=min(ends)) if ends else None

    def hinted(self) -> bool:
        return False

    def _concerns_us(self, event: Mapping[str, Any]) -> bool:
        # Machines of a scale set are listed with a leading underscore.
        resources = [str(name).lower().removeprefix("_") for name in event["Resources"]]
        return (
            event["EventType"] in self.ending and (self._name or "").removeprefix("_") in resources
        )

    def _get(self, path: str) -> Answer:
        return _checked(self._client.request("GET", path, {"Metadata": "true"}), path)


CLOUDS: dict[str, type[AwsWatch] | type[GcpWatch] | type[AzureWatch]] = {
    "aws": AwsWatch,
    "gcp": GcpWatch,
    "azure": AzureWatch,
}


def detect_cloud(root: Path = DMI) -> str | None:
    """Return the cloud of this machine according to its firmware. It only reads files.

    Args:
        root (`Path`): folder with the firmware's files (DMI).

    Returns:
        `str`: one of `CLOUDS`, or None if the machine is in none of these clouds.
    """
    vendors = " ".join(
        _read(root / name) for name in ("sys_vendor", "board_vendor", "bios_vendor", "bios_version")
    )
    if "amazon" in vendors.lower():
        return "aws"
    if "Google" in vendors:
        return "gcp"
    return "azure" if _read(root / "chassis_asset_tag") == AZURE_ASSET_TAG else None


def check_cloud(name: str, value: Any) -> None:
    """Check that a value is one of `CLOUDS`, "auto" or None."""
    if value not in (None, "auto", *CLOUDS):
        rule = f"use auto, {', '.join(CLOUDS)}, or {spelled_value(None)}"
        raise ParameterError(name, value, rule)


def watch_cloud(
    cloud: str | None = "auto",
    *,
    notices: PreemptionNotices = NOTICES,
    client: MetadataClient | None = None,
    root: Path = DMI,
    environ: Mapping[str, str] = os.environ,
) -> "CloudPoller | None":
    """Start a thread that polls a cloud's metadata service.

    Args:
        cloud (`str`, *optional*): one of `CLOUDS`. "auto" means the value of the environment variable `HFSCALE_CLOUD`
            (aws, gcp, azure or none), or, if it is not set, the cloud of this machine. With None nothing is polled.
        notices (`PreemptionNotices`): collection to which notices and hints are added.
        client (`MetadataClient`, *optional*): client of the metadata service; by default a client of `METADATA_URL`.
        root (`Path`): folder with the firmware's files, for `detect_cloud`.
        environ (`Mapping[str, str]`): the environment variables.

    Returns:
        `CloudPoller`: the polling thread, or None if nothing is polled.

    Raises:
        UsageError: `cloud` or `HFSCALE_CLOUD` has an unknown value.
    """
    check_cloud("cloud", cloud)
    if cloud == "auto" and OVERRIDE in environ:
        cloud = environ[OVERRIDE].lower()
        if cloud not in ("none", *CLOUDS):
            raise UsageError(f"{OVERRIDE}={cloud}: give {', '.join(CLOUDS)} or none")
    if cloud == "auto":
        cloud = detect_cloud(root)
    if cloud is None or cloud == "none":
        return None
    poller = CloudPoller(CLOUDS[cloud](client or MetadataClient()), notices)
    poller.start()
    return poller


class CloudPoller(threading.Thread):
    """Polls one cloud, adds its notices, and withdraws those that the cloud cancels.

    A service that fails is polled less often, and one warning is logged.

    Args:
        watch (`CloudWatch`): reads the cloud's notices.
        notices (`PreemptionNotices`): collection to which they are added.
    """

    def __init__(self, watch: CloudWatch, notices: PreemptionNotices) -> None:
        super().__init__(daemon=True, name="hfscale-cloud")
        self._watch = watch
        self._notices = notices
        self._stopped = threading.Event()
        self._failures = 0

    def stop(self) -> None:
        """Make the thread end; a request in progress still runs until its time limit."""
        self._stopped.set()

    def run(self) -> None:
        """Poll until `stop` is called."""
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            pause_s = self._watch.every_s
            try:
                notice = self._watch.poll()
                hinted = self._watch.hinted()
            except Exception as error:  # whatever a server sends, polling must continue
                pause_s = self._after_failure(error)
                continue
            self._failures = 0
            if self._stopped.is_set():
                return
            if notice is None:
                self._notices.withdraw(self._watch.source)
            else:
                self._notices.add(notice)
            if hinted:
                self._notices.add_hint(self._watch.source)

    def _after_failure(self, error: Exception) -> float:
        self._failures += 1
        if self._failures == _FAILURES_BEFORE_A_WARNING:
            logger.warning(
                "the metadata service for %s does not work, polling continues: %s",
                self._watch.source,
                error,
            )
        return min(max(self._watch.every_s, 1.0) * 2.0 ** min(self._failures, 5), _LONGEST_PAUSE_S)


def _checked(answer: Answer, path: str) -> Answer:
    if answer.status != 200:
        raise MetadataError(f"{path} answered {answer.status}")
    return answer


def _seconds_left(event: Mapping[str, Any], answer: Answer) -> float:
    """Return the seconds until a scheduled event of Azure; its `NotBefore` is empty once it has begun."""
    not_before = event.get("NotBefore")
    return _seconds_until(parsedate_to_datetime(not_before), answer) if not_before else 0.0


def _seconds_until(moment: datetime, answer: Answer) -> float:
    """Return the seconds from an answer until `moment`, at least 0.

    The time of the answer is its `Date`, since this machine's clock may be wrong. HTTP lets a server without a clock
    leave it out; then it is this machine's. A time without a zone is UTC, as the clouds write it.
    """
    date = answer.headers.get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max((aware - now).total_seconds(), 0.0)


def _read(path: Path) -> str:
    """Return the text of a firmware file; empty if it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
