"""Cloud notices, read from a metadata service on loopback that gives wrong answers, hangs and cancels notices."""

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from metadata_server import MetadataServer, Reply

from hfscale.checkpoint.preemption import PreemptionNotices, clouds, detect_cloud, watch_cloud
from hfscale.checkpoint.preemption.clouds import (
    AZURE_ASSET_TAG,
    MAX_BYTES,
    METADATA_URL,
    AwsWatch,
    AzureWatch,
    GcpWatch,
    MetadataClient,
    MetadataError,
)
from hfscale.errors import UsageError

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN = "/latest/api/token"  # noqa: S105
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"
GOOGLE = {"Metadata-Flavor": "Google", "ETag": "abc123"}


@pytest.fixture
def server():
    service = MetadataServer()
    yield service
    service.close()


@pytest.fixture
def client(server):
    return MetadataClient(server.url, timeout_s=60.0)


@pytest.fixture
def hasty(server):
    """A client that gives up soon, for replies that take too long."""
    return MetadataClient(server.url, timeout_s=0.5)


def time_in(seconds):
    return datetime.now(UTC) + timedelta(seconds=seconds)


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


class TestClient:
    def test_the_default_host_is_the_link_local_address(self):
        client = MetadataClient()
        assert (METADATA_URL, client._host, client._port) == ("http://169.254.169.254", "169.254.169.254", 80)
        assert client.timeout_s <= 2

    def test_proxies_of_the_environment_are_not_used(self, server, client, monkeypatch):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        server.replies["/x"] = Reply(body="here")
        assert client.request("GET", "/x", {}).text == "here"

    def test_redirects_are_not_followed(self, server, client):
        server.replies |= {"/x": Reply(302, headers={"Location": f"{server.url}/y"}), "/y": Reply(body="there")}
        with pytest.raises(MetadataError, match="redirect"):
            client.request("GET", "/x", {})
        assert server.paths() == ["/x"]

    @pytest.mark.parametrize(
        ("reply", "text"),
        [
            (Reply(hang_s=100.0), "timed out"),
            (Reply(body="x" * 1000, drip_s=0.1), "did not end in time|timed out"),
        ],
    )
    def test_requests_are_limited_in_time(self, server, hasty, reply, text):
        server.replies["/x"] = reply
        begun = time.monotonic()
        with pytest.raises(MetadataError, match=text):
            hasty.request("GET", "/x", {})
        assert time.monotonic() - begun < 60

    @pytest.mark.parametrize(
        ("body", "text"), [("x" * (MAX_BYTES + 1), "longer than 65536 bytes"), (b"\xff\xfe", "UnicodeDecodeError")]
    )
    def test_answers_are_limited_in_size_and_must_be_text(self, server, client, body, text):
        server.replies["/x"] = Reply(body=body)
        with pytest.raises(MetadataError, match=text):
            client.request("GET", "/x", {})

    def test_a_refused_connection_is_an_error(self):
        with pytest.raises(MetadataError, match="ConnectionRefusedError"):
            MetadataClient("http://127.0.0.1:9").request("GET", "/x", {})


class TestAws:
    @pytest.fixture
    def aws(self, server, client):
        server.replies[TOKEN] = Reply(body="token-1")
        return AwsWatch(client)

    def test_404_is_no_notice_and_the_token_is_sent(self, server, aws):
        assert aws.poll() is None
        assert aws.poll() is None
        methods = [(method, path) for method, path, _ in server.requests]
        assert methods == [("PUT", TOKEN), ("GET", ACTION), ("GET", ACTION)]
        assert server.requests[0][2]["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        assert server.requests[1][2]["X-aws-ec2-metadata-token"] == "token-1"

    @pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
    def test_a_notice_has_the_seconds_left(self, server, aws, action):
        moment = time_in(120).strftime("%Y-%m-%dT%H:%M:%SZ")
        server.replies[ACTION] = Reply(body=json.dumps({"action": action, "time": moment}))
        assert aws.poll().seconds_left() == pytest.approx(120, abs=60)

    @pytest.mark.parametrize("fast_s", [-300, 300])
    def test_the_clock_of_this_machine_does_not_matter(self, server, aws, fast_s):
        action = {"action": "stop", "time": time_in(120 - fast_s).strftime("%Y-%m-%dT%H:%M:%SZ")}
        server.replies[ACTION] = Reply(
            body=json.dumps(action), headers={"Date": format_datetime(time_in(-fast_s), True)}
        )
        assert aws.poll().seconds_left() == pytest.approx(120, abs=60)

    def test_a_refused_token_is_replaced_once(self, server, aws):
        tokens = iter(["old", "new"])
        server.replies[TOKEN] = lambda request: Reply(body=next(tokens))
        server.replies[ACTION] = lambda request: Reply(
            404 if request.headers["X-aws-ec2-metadata-token"] == "new" else 401
        )
        assert aws.poll() is None
        assert server.paths() == [TOKEN, ACTION, TOKEN, ACTION]
        server.replies |= {ACTION: Reply(401), TOKEN: Reply(body="new")}
        with pytest.raises(MetadataError, match="refused"):
            aws.poll()

    def test_a_missing_token_names_the_hop_limit(self, server, hasty):
        server.replies[TOKEN] = Reply(hang_s=100.0)
        with pytest.raises(MetadataError, match="hop limit of 2"):
            AwsWatch(hasty).poll()

    def test_a_token_that_would_break_the_header_is_refused(self, server, aws):
        server.replies[TOKEN] = Reply(body="a\r\nHost: elsewhere")
        with pytest.raises(MetadataError, match="token"):
            aws.poll()

    @pytest.mark.parametrize("body", ["not JSON", "[]", "{}", '{"time": 3}', '{"time": "soon"}'])
    def test_bad_answers_are_errors(self, server, aws, body):
        server.replies[ACTION] = Reply(body=body)
        with pytest.raises((ValueError, KeyError, TypeError)):
            aws.poll()

    def test_a_rebalance_recommendation_is_one_hint(self, server, aws):
        assert not aws.hinted()
        server.replies[REBALANCE] = Reply(body='{"noticeTime": "2026-01-01T00:00:00Z"}')
        assert [aws.hinted(), aws.hinted()] == [True, False]


class TestGcp:
    def test_the_server_is_asked_to_wait_for_a_change(self, server, hasty):
        gcp = GcpWatch(hasty)
        server.replies[PREEMPTED] = Reply(body="FALSE", headers=GOOGLE)
        assert gcp.poll() is None
        server.replies[PREEMPTED] = Reply(
            body="TRUE", headers=GOOGLE, hang_s=1.0
        )  # longer than the limit of other requests
        assert gcp.poll().seconds_left() == pytest.approx(30, abs=20)
        queries = [path.partition("?")[2] for _, path, _ in server.requests]
        assert queries == [f"wait_for_change=true&timeout_sec=30&last_etag={tag}" for tag in ("0", "abc123")]
        assert all(headers["Metadata-Flavor"] == "Google" for _, _, headers in server.requests)

    @pytest.mark.parametrize(
        "reply",
        [
            Reply(body="TRUE"),
            Reply(body="TRUE", headers={"Metadata-Flavor": "Google"}),
            Reply(body="TRUE", headers=GOOGLE | {"ETag": "a&b"}),
            Reply(body="perhaps", headers=GOOGLE),
            Reply(500, body="TRUE", headers=GOOGLE),
        ],
    )
    def test_answers_without_the_signature_of_google_are_errors(self, server, client, reply):
        server.replies[PREEMPTED] = reply
        with pytest.raises(MetadataError):
            GcpWatch(client).poll()


def azure_event(*resources, seconds=30.0, kind="Preempt", **changes):
    event = {
        "EventId": "1",
        "EventType": kind,
        "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": format_datetime(time_in(seconds), usegmt=True),
    }
    return Reply(body=json.dumps({"DocumentIncarnation": 1, "Events": [event | changes]}))


class TestAzure:
    @pytest.fixture
    def azure(self, server, client):
        server.replies[NAME] = Reply(body="trainer_0")
        return AzureWatch(client)

    @pytest.mark.parametrize("name", ["trainer_0", "Trainer_0", "_trainer_0"])
    def test_an_event_of_this_machine(self, server, azure, name):
        server.replies[EVENTS] = azure_event("other", name)
        assert azure.poll().seconds_left() == pytest.approx(30, abs=20)
        assert all(headers["Metadata"] == "true" for _, _, headers in server.requests)

    def test_an_event_that_has_begun_leaves_no_time(self, server, azure):
        server.replies[EVENTS] = azure_event("trainer_0", NotBefore="", EventStatus="Started")
        assert azure.poll().seconds_left() == pytest.approx(0, abs=20)

    def test_the_earliest_of_several_events_is_the_notice(self, server, azure):
        first, second = (json.loads(azure_event("trainer_0", seconds=s).body)["Events"][0] for s in (600, 150))
        server.replies[EVENTS] = Reply(body=json.dumps({"Events": [first, second]}))
        assert azure.poll().seconds_left() == pytest.approx(150, abs=60)

    @pytest.mark.parametrize(
        "reply", [azure_event("other"), azure_event("trainer_0", kind="Freeze"), Reply(body='{"Events": []}')]
    )
    def test_other_machines_and_event_types_are_ignored(self, server, azure, reply):
        server.replies[EVENTS] = reply
        assert azure.poll() is None

    @pytest.mark.parametrize("body", ["", "[]", "{}", '{"Events": [{}]}', '{"Events": 3}'])
    def test_bad_answers_are_errors(self, server, azure, body):
        server.replies[EVENTS] = Reply(body=body)
        with pytest.raises((ValueError, KeyError, TypeError)):
            azure.poll()


class TestPoller:
    @pytest.fixture
    def notices(self, monkeypatch):
        for watch in (AwsWatch, AzureWatch):
            monkeypatch.setattr(watch, "every_s", 0.02)
        monkeypatch.setattr(clouds, "_LONGEST_PAUSE_S", 0.05)
        return PreemptionNotices()

    @pytest.fixture
    def poll(self, notices, hasty):
        pollers = []

        def start(cloud):
            pollers.append(watch_cloud(cloud, notices=notices, client=hasty, environ={}))
            return pollers[-1]

        yield start
        for poller in pollers:
            poller.stop()
            poller.join(120)
            assert not poller.is_alive()

    def test_a_notice_is_added_with_its_deadline(self, server, notices, poll):
        server.replies |= {TOKEN: Reply(body="t"), REBALANCE: Reply(body="{}")}
        poll("aws")
        assert wait_for(lambda: server.paths().count(ACTION) > 2)
        assert notices.pending() == []
        assert wait_for(notices.take_hint)
        moment = time_in(120).isoformat()
        server.replies[ACTION] = Reply(body=json.dumps({"action": "terminate", "time": moment}))
        assert wait_for(notices.pending)
        [notice] = notices.pending()
        assert (notice.source, notice.seconds_left()) == ("AWS spot notice", pytest.approx(120, abs=60))

    def test_a_cancelled_event_withdraws_the_notice(self, server, notices, poll):
        server.replies |= {NAME: Reply(body="me"), EVENTS: azure_event("me")}
        poll("azure")
        assert wait_for(notices.pending)
        server.replies[EVENTS] = Reply(body='{"Events": []}')
        assert wait_for(lambda: not notices.pending())

    @pytest.mark.parametrize(
        "failure",
        [Reply(500), Reply(hang_s=1.0), Reply(body="{"), Reply(body="[" * 60_000), Reply(body="x" * 10**6)],
        ids=["500", "hang", "bad JSON", "deep JSON", "huge"],
    )
    def test_polling_continues_after_failures_with_one_warning(self, server, notices, poll, caplog, failure):
        server.replies |= {TOKEN: Reply(body="t"), ACTION: failure}
        with caplog.at_level("WARNING", logger="hfscale"):
            poll("aws")
            assert wait_for(lambda: server.paths().count(ACTION) > 4)
        assert notices.pending() == []
        assert len([record for record in caplog.records if "AWS spot notice" in record.message]) == 1
        server.replies[ACTION] = Reply(body=json.dumps({"action": "stop", "time": time_in(120).isoformat()}))
        assert wait_for(notices.pending)


class TestWhichCloud:
    @pytest.mark.parametrize(
        ("files", "cloud"),
        [
            ({"sys_vendor": "Amazon EC2"}, "aws"),
            ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
            ({"sys_vendor": "Google", "bios_vendor": "Google"}, "gcp"),
            ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": f"{AZURE_ASSET_TAG}\n"}, "azure"),
            ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "1234"}, None),
            ({"sys_vendor": "Dell Inc.", "board_vendor": "Dell Inc."}, None),
            ({}, None),
        ],
    )
    def test_the_firmware_identifies_the_cloud(self, tmp_path, files, cloud):
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        assert detect_cloud(tmp_path) == cloud

    def test_nothing_is_requested_on_an_unknown_machine(self, tmp_path, client, server):
        assert watch_cloud("auto", client=client, root=tmp_path, environ={}) is None
        assert watch_cloud(None, client=client, root=tmp_path, environ={"HFSCALE_CLOUD": "aws"}) is None
        (tmp_path / "sys_vendor").write_text("Google")
        assert watch_cloud("auto", client=client, root=tmp_path, environ={"HFSCALE_CLOUD": "none"}) is None
        assert server.requests == []

    def test_polling_starts_by_firmware_or_by_name(self, tmp_path, client, server):
        (tmp_path / "sys_vendor").write_text("Google")
        for cloud, environ, path in (
            ("auto", {}, PREEMPTED),
            ("azure", {}, NAME),
            ("auto", {"HFSCALE_CLOUD": "AWS"}, TOKEN),
        ):
            poller = watch_cloud(cloud, notices=PreemptionNotices(), client=client, root=tmp_path, environ=environ)
            assert wait_for(lambda path=path: path in server.paths())
            poller.stop()

    def test_an_unknown_name_is_a_usage_error(self, tmp_path):
        with pytest.raises(UsageError, match="cloud is 'alibaba'"):
            watch_cloud("alibaba")
        with pytest.raises(UsageError, match="HFSCALE_CLOUD=oracle"):
            watch_cloud("auto", root=tmp_path, environ={"HFSCALE_CLOUD": "oracle"})
