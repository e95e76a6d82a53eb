"""Notices of AWS, GCP and Azure that they take a machine back, polled from a thread.

| cloud | asked | answer | lead |
|---|---|---|---|
| aws | `/latest/meta-data/spot/instance-action` (IMDSv2), every 5 s | 404, or `{"action", "time"}` | 120 s |
| gcp | `/computeMetadata/v1/instance/preempted?wait_for_change=true` | `FALSE`, `TRUE` | 30 s |
| azure | `/metadata/scheduledevents`, every 2 s | events, each with its machines and `NotBefore` | 30 s or more |

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_an_instance_was_preempted
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

A service is asked only on a machine of its cloud, by what its firmware says (DMI), or when its cloud is named.
"""

import json
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from hfscale.errors import UsageError
from hfscale.preemption.metadata import Answer, MetadataClient, MetadataError
from hfscale.preemption.notice import AWS, AZURE, BOARD, GCP, Notice, NoticeBoard
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

DMI = Path("/sys/class/dmi/id")
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis asset tag of every Azure machine; Hyper-V elsewhere has the same vendor, but not this."""
OVERRIDE = "HFSCALE_CLOUD"
_FAILURES_BEFORE_A_WARNING = 3
_LONGEST_PAUSE_S = 20.0  # under the shortest lead, so that a service that comes back is heard in time


class CloudWatch(Protocol):
    """How one cloud is asked."""

    source: str
    every_s: float

    def poll(self) -> Notice | None:
        """The notice that stands now. Raises MetadataError, ValueError, KeyError or TypeError for a bad answer."""

    def hinted(self) -> bool:
        """Whether a notice is said to be likely. Raises as `poll` does."""


class AwsWatch:
    """EC2 spot interruptions, and the rebalance recommendation that can come ahead of them. IMDSv2 only."""

    source, every_s = AWS, 5.0

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._token: str | None = None
        self._was_hinted = False

    def poll(self) -> Notice | None:
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer is None:
            return None
        action = json.loads(answer)
        ends = datetime.fromisoformat(action["time"])
        return Notice(source=self.source, seconds=_seconds_until(ends))

    def hinted(self) -> bool:
        if self._was_hinted:
            return False
        self._was_hinted = self._get("/latest/meta-data/events/recommendations/rebalance") is not None
        return self._was_hinted

    def _get(self, path: str) -> str | None:
        """The text, None for 404. A token that was refused is replaced once."""
        for _ in range(2):
            if self._token is None:
                self._token = self._new_token()
            answer = self._client.request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                return None if answer.status == 404 else _text(answer, path)
            self._token = None
        raise MetadataError(f"{path}: a new token was refused too")

    def _new_token(self) -> str:
        path = "/latest/api/token"
        try:
            answer = self._client.request("PUT", path, {"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
        except MetadataError as error:
            raise MetadataError(f"{error} (in a container the instance needs a metadata hop limit of 2)") from error
        token = _text(answer, path)
        if not token.isascii() or not token.isprintable():
            raise MetadataError(f"{path}: what came back is no token")
        return token


class GcpWatch:
    """Compute Engine preemptions, by a request that the server answers when the value changes."""

    source, every_s = GCP, 0.0
    wait_s = 30.0
    """How long the server is asked to wait before it answers with what it has."""
    lead_s = 30.0

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._etag = "0"  # of no value, so that the first answer comes at once

    def poll(self) -> Notice | None:
        path = (
            "/computeMetadata/v1/instance/preempted"
            f"?wait_for_change=true&timeout_sec={self.wait_s:.0f}&last_etag={self._etag}"
        )
        limit_s = self.wait_s + self._client.timeout_s
        answer = self._client.request("GET", path, {"Metadata-Flavor": "Google"}, timeout_s=limit_s)
        value = _text(answer, path).strip()
        if answer.headers.get("metadata-flavor") != "Google" or value not in ("TRUE", "FALSE"):
            raise MetadataError("the answer does not come from Google's metadata service")
        etag = answer.headers.get("etag", "")
        if not etag.isalnum():
            raise MetadataError("the answer has no ETag, so the next change cannot be waited for")
        self._etag = etag
        return Notice(source=self.source, seconds=self.lead_s) if value == "TRUE" else None

    def hinted(self) -> bool:
        return False


class AzureWatch:
    """Azure's scheduled events of this machine: spot evictions and deletions by a scale set."""

    source, every_s = AZURE, 2.0
    ending = ("Preempt", "Terminate")

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._name: str | None = None

    def poll(self) -> Notice | None:
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._get(path).strip().lower()
        document = json.loads(self._get("/metadata/scheduledevents?api-version=2020-07-01"))
        ends = [self._seconds(event) for event in document["Events"] if self._concerns_us(event)]
        return Notice(source=self.source, seconds=min(ends)) if ends else None

    def hinted(self) -> bool:
        return False

    def _concerns_us(self, event: Mapping[str, Any]) -> bool:
        # Machines of a scale set stand in the list with a leading underscore.
        resources = [str(name).lower().removeprefix("_") for name in event["Resources"]]
        return event["EventType"] in self.ending and (self._name or "").removeprefix("_") in resources

    def _seconds(self, event: Mapping[str, Any]) -> float:
        not_before = event.get("NotBefore")
        return _seconds_until(parsedate_to_datetime(not_before)) if not_before else 0.0  # empty once it has begun

    def _get(self, path: str) -> str:
        return _text(self._client.request("GET", path, {"Metadata": "true"}), path)


CLOUDS: dict[str, type[AwsWatch] | type[GcpWatch] | type[AzureWatch]] = {
    "aws": AwsWatch,
    "gcp": GcpWatch,
    "azure": AzureWatch,
}


def detect_cloud(root: Path = DMI) -> str | None:
    """The cloud whose firmware this machine has, one of `CLOUDS`, or None. Reads files only."""
    vendors = " ".join(_read(root / name) for name in ("sys_vendor", "board_vendor", "bios_vendor", "bios_version"))
    if "amazon" in vendors.lower():
        return "aws"
    if "Google" in vendors:
        return "gcp"
    return "azure" if _read(root / "chassis_asset_tag") == AZURE_ASSET_TAG else None


def check_cloud(cloud: str | None) -> None:
    """Raise a UsageError for a cloud that is none of `CLOUDS`, "auto" or None."""
    if cloud not in (None, "auto", *CLOUDS):
        raise UsageError(f"cloud is '{cloud}': give auto, {', '.join(CLOUDS)}, or None")


def watch_cloud(
    cloud: str | None = "auto",
    *,
    board: NoticeBoard = BOARD,
    client: MetadataClient | None = None,
    root: Path = DMI,
    environ: Mapping[str, str] = os.environ,
) -> "CloudPoller | None":
    """Begin to poll the cloud named; "auto": the one this machine is of, if any. None: no cloud, no polling.

    `HFSCALE_CLOUD` (aws, gcp, azure or none) in the environment takes the place of "auto".

    Raises:
        UsageError: an unknown name.
    """
    check_cloud(cloud)
    if cloud == "auto" and OVERRIDE in environ:
        cloud = environ[OVERRIDE].lower()
        if cloud not in ("none", *CLOUDS):
            raise UsageError(f"{OVERRIDE}={cloud}: give {', '.join(CLOUDS)} or none")
    if cloud == "auto":
        cloud = detect_cloud(root)
    if cloud is None or cloud == "none":
        return None
    poller = CloudPoller(CLOUDS[cloud](client or MetadataClient()), board)
    poller.start()
    return poller


class CloudPoller(threading.Thread):
    """Asks again and again, posts what it hears and withdraws what no longer stands; a failing service is asked more
    rarely, and complained of once."""

    def __init__(self, watch: CloudWatch, board: NoticeBoard) -> None:
        super().__init__(daemon=True, name="hfscale-cloud")
        self._watch = watch
        self._board = board
        self._stopped = threading.Event()
        self._failures = 0

    def stop(self) -> None:
        """End it; a request under way is left to run into its limit."""
        self._stopped.set()

    def run(self) -> None:
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            pause_s = self._watch.every_s
            try:
                notice = self._watch.poll()
                hinted = self._watch.hinted()
            except Exception as error:  # whatever a server sends, the thread has to go on asking
                pause_s = self._after_failure(error)
                continue
            self._failures = 0
            if self._stopped.is_set():
                return
            if notice is None:
                self._board.withdraw(self._watch.source)
            else:
                self._board.post(notice)
            if hinted:
                self._board.hint(self._watch.source)

    def _after_failure(self, error: Exception) -> float:
        self._failures += 1
        if self._failures == _FAILURES_BEFORE_A_WARNING:
            logger.warning("no notices of %s for now, it is tried again: %s", self._watch.source, error)
        return min(max(self._watch.every_s, 1.0) * 2.0 ** min(self._failures, 5), _LONGEST_PAUSE_S)


def _text(answer: Answer, path: str) -> str:
    if answer.status != 200:
        raise MetadataError(f"{path} answered {answer.status}")
    return answer.text


def _seconds_until(moment: datetime) -> float:
    """From now, never negative; a time without a zone is UTC, as the clouds write it."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max((aware - datetime.now(UTC)).total_seconds(), 0.0)


def _read(path: Path) -> str:
    """A firmware file, empty where there is none or it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
