"""`hfscale watch`: its numbers are the report's, it follows growing files, and it gives them to nobody else."""

import gzip
import http.client
import json
import os
import re
import socket
import subprocess
import threading
import time
import tracemalloc
import urllib.request
from contextlib import ExitStack, contextmanager, suppress

import pytest
from browser import browser_command, needs_browser
from conftest import REPOSITORY

from hfscale.cli import main
from hfscale.core import records
from hfscale.core.records import RecordTail, read_records
from hfscale.errors import UsageError
from hfscale.health.callback import CommHealthCallback
from hfscale.metrics.callback import ScalingMetricsCallback
from hfscale.report.forecast import forecast
from hfscale.report.html import MAX_POINTS
from hfscale.report.prediction import predict
from hfscale.report.record_rows import RecordRows
from hfscale.report.run_data import load_run
from hfscale.report.sections import sections
from hfscale.report.summary import headline
from hfscale.report.watch import live, open_metrics
from hfscale.report.watch import page as watch_page
from hfscale.report.watch import server as watch_server
from hfscale.report.watch.live import LiveRun
from hfscale.report.watch.open_metrics import DESCRIPTIONS, Textfile, exposition, metric_name
from hfscale.report.watch.page import PAGE
from hfscale.report.watch.server import WatchServer

BEGIN = 1_790_000_000.0
TOKEN = "a-token-of-some-length"  # noqa: S105
DASHBOARD = REPOSITORY / "launch" / "grafana" / "hfscale.json"
EVERYWHERE = "0.0.0.0"  # noqa: S104
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def append(path, *rows):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def log(step, **more):
    return {
        "step": step,
        "time": BEGIN + 10 * step,
        "loss": 9 - step / 20,
        "learning_rate": 1e-4,
        "scaling/tokens_per_s": 40_000.0,
        "scaling/tokens_per_s_per_gpu": 10_000.0,
        "scaling/tokens_seen": step * 65536,
        "scaling/mfu": 0.41,
        "scaling/goodput": 0.6,
        "scaling/usd": 0.0275 * step,
        **more,
    }


def write_running(folder):
    """Write the files of a run of 100 steps on 4 GPUs that is at step 40, at 10 s per step and $2.50 per GPU-hour."""
    folder.mkdir(parents=True)
    append(
        folder / "hfscale_timeline.jsonl",
        {"event": "launch", "step": 0, "time": BEGIN, "world_size": 4, "max_steps": 100},
        {"event": "workload", "step": 10, "time": BEGIN + 100, "usd_per_gpu_hour": 2.5, "world_size": 4},
    )
    append(folder / "scaling.jsonl", *[log(step) for step in (10, 20, 30, 40)])
    append(
        folder / "hfscale_ranks.jsonl",
        *[{"step": step, "data_wait_fraction": [0.01, 0.25], "compute_s": [1.0, 2.0]} for step in (10, 20, 30, 40)],
    )
    (folder / "hfscale_status.json").write_text('{"status": "running", "step": 40, "checkpoint": null}')
    return folder


@pytest.fixture
def run_dir(tmp_path):
    return write_running(tmp_path / "run")


def str_of(value):
    return str(value)[:5]


@contextmanager
def serving(*folders, token=None, is_local=True, allows_save=False):
    runs = {folder.name: LiveRun(folder) for folder in folders}
    with WatchServer(runs, host="127.0.0.1", port=0, token=token, allows_save=allows_save) as server:
        server.is_local = is_local
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, *, method="GET", host=None, **headers):
    """The status, the headers and the body of an answer."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"localhost:{port}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def data(server, **query):
    path = "/api/run.json?" + "&".join(f"{key}={value}" for key, value in query.items())
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


@pytest.fixture
def no_refresh_limit(monkeypatch):
    monkeypatch.setattr(live, "REFRESH_S", 0.0)


class TestTail:
    def test_it_reads_what_was_appended_and_nothing_twice(self, tmp_path):
        path = tmp_path / "scaling.jsonl"
        tail = RecordTail(path)
        assert tail.read() == ([], False)
        append(path, {"step": 1}, {"step": 2})
        assert tail.read() == ([{"step": 1}, {"step": 2}], False)
        append(path, {"step": 3})
        assert tail.read() == ([{"step": 3}], False)
        assert tail.read() == ([], False)

    def test_a_half_line_is_read_when_it_is_complete(self, tmp_path):
        path = tmp_path / "scaling.jsonl"
        text = '{"step": 1, "loss": 2.5, "text": "größer"}\n{"step": 2}'.encode()
        tail = RecordTail(path)
        found = []
        for end in range(1, len(text) + 1):
            path.write_bytes(text[:end])
            new, began_anew = tail.read()
            assert not began_anew
            found += new
        assert found == read_records(path) == [{"step": 1, "loss": 2.5, "text": "größer"}, {"step": 2}]

    def test_damaged_lines_are_left_out_as_in_the_report(self, tmp_path):
        path = tmp_path / "scaling.jsonl"
        path.write_bytes(
            b'\xff\xfe\n[1]\n{"loss": 1}\n{"step": 1, "x": "\xff"}\n' + b"[" * 100_000 + b'\n{"step": 2}\n'
        )
        assert RecordTail(path).read()[0] == read_records(path)
        assert [record["step"] for record in read_records(path)] == [1, 2]

    @pytest.mark.parametrize("how", ["truncated", "replaced", "longer", "gone"])
    def test_a_file_that_was_cut_or_replaced_is_read_from_its_beginning(self, tmp_path, how):
        path = tmp_path / "scaling.jsonl"
        append(path, *[{"step": step, "time": float(step)} for step in range(20)])
        tail = RecordTail(path)
        tail.read()
        kept = [{"step": step, "time": 100.0 + step} for step in range(3 if how != "longer" else 40)]
        if how in ("replaced", "longer", "gone"):
            path.unlink()
        if how == "truncated":
            os.truncate(path, 0)
        if how != "gone":
            append(path, *kept)
        assert tail.read() == ([] if how == "gone" else kept, True)
        assert tail.read() == ([], False)


def test_what_is_left_is_computed_from_the_newest_logs(run_dir):
    left = forecast(load_run(run_dir))
    assert left.seconds_left == pytest.approx(600)
    assert left.usd_to_end == pytest.approx(600 / 3600 * 4 * 2.5)
    assert left.usd_total == pytest.approx(1.1 + left.usd_to_end)
    (run_dir / "hfscale_status.json").write_text('{"status": "completed"}')
    assert forecast(load_run(run_dir)) is None


def test_the_time_left_of_a_growing_batch_is_that_of_its_passes(run_dir):
    launch = {"event": "launch", "step": 40, "time": BEGIN + 4000, "world_size": 2, "max_steps": 100}
    append(run_dir / "hfscale_timeline.jsonl", launch)
    rows = [log(step, time=BEGIN + 4100 + step, epoch=epoch) for step, epoch in ((50, 1.0), (60, 1.5))]
    append(run_dir / "scaling.jsonl", *[row | {"scaling/global_batch": 8.0 * row["epoch"]} for row in rows])
    assert forecast(load_run(run_dir)) is None
    append(run_dir / "hfscale_timeline.jsonl", launch | {"passes": 3.0})
    assert forecast(load_run(run_dir)).seconds_left == pytest.approx(1.5 * 10 / 0.5)


def test_steps_of_an_earlier_launch_do_not_count_for_the_time_left(run_dir):
    launch = {"event": "launch", "step": 40, "time": BEGIN + 4000, "world_size": 2, "max_steps": 100}
    append(run_dir / "hfscale_timeline.jsonl", launch)
    assert forecast(load_run(run_dir)) is None
    append(run_dir / "scaling.jsonl", log(50, time=BEGIN + 4100), log(60, time=BEGIN + 4300))
    left = forecast(load_run(run_dir))
    assert left.seconds_left == pytest.approx(40 * 20)
    assert left.usd_to_end == pytest.approx(800 / 3600 * 2 * 2.5)


def test_the_page_has_the_numbers_of_the_report(run_dir):
    with serving(run_dir) as server:
        answer = data(server, run="run")
    tiles = {tile["name"]: tile["value"] for tile in answer["summary"]["tiles"]}
    report = {tile.name: tile.value for tile in headline(load_run(run_dir))}
    assert report.items() <= tiles.items()
    assert tiles["Time left"] == "10 min"
    assert tiles["Cost to the end"] == "$1.67"
    assert answer["points"]["step"] == [10, 20, 30, 40]
    assert answer["points"]["loss"] == [8.5, 8.0, 7.5, 7.0]
    maps = {one["label"]: one for one in answer["summary"]["ranks"]}
    assert maps["Waiting for data, by rank"]["values"][0] == [0.01, 0.25]
    assert answer["summary"]["max_steps"] == 100
    assert answer["alive_at"] == BEGIN + 400


def test_alarms_of_the_run_are_shown_the_newest_first(run_dir):
    alarm = {"event": "alarm", "step": 20, "time": BEGIN + 200, "kind": "loss", "level": "warning", "text": "it jumps"}
    strange = alarm | {"kind": "<b>", "level": "<i>", "text": 5}
    append(run_dir / "hfscale_timeline.jsonl", alarm, alarm | {"kind": "hang", "level": "error", "step": 30}, strange)
    with serving(run_dir) as server:
        shown = data(server, run="run")["summary"]["alarms"]
        text = ask(server, "/metrics")[2]
    assert [(one["kind"], one["level"], one["step"]) for one in shown] == [
        ("hang", "error", "30"),
        ("loss", "warning", "20"),
    ]
    assert shown[1]["text"] == "it jumps"
    assert shown[1]["time"].endswith("UTC")
    assert 'hfscale_alarms{run="run"} 3.0' in text


def test_only_new_records_are_sent(run_dir, no_refresh_limit):
    with serving(run_dir) as server:
        first = data(server, run="run")
        known = {"after": first["next"], "generation": first["generation"], "version": first["version"]}
        nothing = data(server, run="run", **known)
        assert nothing["points"] == {}
        assert nothing["summary"] is None
        append(run_dir / "scaling.jsonl", log(50))
        second = data(server, run="run", **known)
        assert (second["first"], second["next"], second["points"]["step"]) == (4, 5, [50])
        assert second["summary"]["last"]["step"] == 50
        (run_dir / "scaling.jsonl").write_text("")  # a launch that repeats steps 30 and 40
        append(run_dir / "scaling.jsonl", *[log(step, time=BEGIN + 5000 + step) for step in (10, 20)])
        third = data(server, run="run", after=5, generation=second["generation"])
        assert (third["first"], third["next"], third["points"]["step"]) == (0, 2, [10, 20])


def test_a_long_run_is_thinned_and_keeps_its_newest_log(run_dir):
    append(run_dir / "scaling.jsonl", *[log(step) for step in range(50, 50_050, 10)])
    with serving(run_dir) as server:
        answer = data(server, run="run")
    assert len(answer["points"]["step"]) <= live.MAX_NEW_POINTS
    assert answer["points"]["step"][-1] == 50_040
    assert answer["next"] == 5004


def test_a_run_that_has_written_nothing_yet_and_a_finished_one_are_shown(tmp_path, run_dir):
    (tmp_path / "new").mkdir()
    (run_dir / "hfscale_status.json").write_text('{"status": "completed"}')
    with serving(tmp_path / "new", run_dir) as server:
        assert data(server, run="new")["summary"]["last"]["step"] is None
        assert data(server, run="run")["summary"]["status"] == "completed"
        assert json.loads(ask(server, "/api/runs.json")[2])["runs"] == ["new", "run"]


def drawn(server, **query):
    """What the page shows of the first run."""
    path = "/api/sections.json?" + "&".join(f"{key}={value}" for key, value in query.items())
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


def directives(policy):
    """The parts of a Content-Security-Policy by name."""
    return dict(one.strip().split(" ", 1) for one in policy.split(";"))


class TestSections:
    def test_they_are_those_of_the_report(self, run_dir):
        with serving(run_dir) as server:
            answer = drawn(server)
        run = load_run(run_dir)
        of_report = sections(run, predict(run))
        shared = {name: html for name, html in of_report.items() if html and name != "tiles"}
        assert {"bottlenecks", "prediction", "timeline", "charts", "ranks"} <= shared.keys()
        assert [name for name, html in shared.items() if html not in answer["sections"]] == []
        for tile in headline(run):
            assert f"<strong>{tile.value}</strong>" in answer["sections"]
        assert "<strong>10 min</strong><small>at the speed of the newest logs" in answer["sections"]
        assert answer["sections"].index("Loss") < answer["sections"].index("Timeline")

    def test_the_header_says_how_far_the_run_is_and_when_it_was_last_heard_of(self, run_dir, monkeypatch):
        monkeypatch.setattr(watch_page.time, "time", lambda: BEGIN + 400 + 5)
        with serving(run_dir) as server:
            header = drawn(server)["header"]
            monkeypatch.setattr(watch_page.time, "time", lambda: BEGIN + 400 + 3 * 3600)
            later = drawn(server)["header"]
        assert "step 40 of 100 · loss 7 · learning rate 0.0001 · <span>last record 5 s ago" in header
        assert '<progress max="100" value="40"' in header
        assert '<span class="quiet">last record 3 h ago' in later

    def test_sections_that_the_page_has_are_not_sent_again(self, run_dir, no_refresh_limit):
        with serving(run_dir) as server:
            first = drawn(server)
            again = drawn(server, version=first["version"])
            assert (again["sections"], again["version"]) == (None, first["version"])
            assert "step 40" in again["header"]
            append(run_dir / "scaling.jsonl", log(50))
            third = drawn(server, version=first["version"])
        assert third["version"] != first["version"]
        assert "50 steps" in third["sections"]

    def test_a_reading_is_drawn_once_for_all_pages(self, run_dir, monkeypatch):
        calls = []
        monkeypatch.setattr(watch_page, "sections", lambda *args, **more: calls.append(1) or sections(*args, **more))
        with serving(run_dir) as server:
            for _ in range(3):
                drawn(server)
        assert len(calls) == 1

    @pytest.mark.long
    def test_a_long_run_is_a_short_answer(self, run_dir):
        """Thousands of logs, saves, launches and checkpoints, on many ranks."""
        ranks = [0.01 * rank for rank in range(256)]
        for begin in range(0, 3000, 100):
            append(
                run_dir / "hfscale_timeline.jsonl", {"event": "launch", "step": begin, "time": BEGIN + 1000 + begin}
            )
            times = [BEGIN + 1000 + begin + second for second in range(100)]
            append(
                run_dir / "hfscale_timeline.jsonl", *[{"event": "save", "step": 50, "time": time} for time in times]
            )
        append(run_dir / "scaling.jsonl", *[log(step) for step in range(50, 50_050, 10)])
        steps = range(50, 1050, 10)
        append(run_dir / "hfscale_ranks.jsonl", *[{"step": step, "data_wait_fraction": ranks} for step in steps])
        for step in range(30):
            (run_dir / f"checkpoint-{step}").mkdir()
        with serving(run_dir) as server:
            headers, answer = ask_compressed(server, "/api/sections.json")
        assert int(headers["Content-Length"]) < 120_000
        shown = json.loads(answer)["sections"]
        assert shown.count('class="lane"') == shown.count("<td>checkpoint-") == live.MAX_ROWS
        assert "<td>checkpoint-29" in shown
        points = re.findall(r'class="line" style="[^"]*" d="M([^"]*)"', shown)
        assert max(len(one.split()) // 2 for one in points) == MAX_POINTS

    def test_only_who_takes_compressed_answers_gets_them(self, run_dir):
        with serving(run_dir) as server:
            plain = ask(server, "/api/sections.json")
            headers, compressed = ask_compressed(server, "/api/sections.json")
            assert "Content-Encoding" not in plain[1]
            assert headers["Content-Encoding"] == "gzip"
            assert json.loads(compressed)["sections"] == json.loads(plain[2])["sections"]
            assert "Content-Encoding" not in ask_compressed(server, "/api/runs.json")[0]

    def test_no_text_of_a_run_becomes_markup(self, run_dir):
        status = {"status": HOSTILE, "step": 40, "checkpoint": None, "reason": HOSTILE}
        (run_dir / "hfscale_status.json").write_text(json.dumps(status))
        texts = {
            "model_type": HOSTILE,
            "strategy": HOSTILE,
            "device": HOSTILE,
            "precision": HOSTILE,
            "baseline": HOSTILE,
        }
        numbers = {"parameters": 7, "world_size": 4, "global_batch_size": 8}
        append(
            run_dir / "hfscale_timeline.jsonl",
            {"event": "workload", "step": 10, "time": BEGIN} | texts | numbers,
            {"event": "alarm", "step": 20, "time": BEGIN, "kind": "hang", "level": HOSTILE, "text": HOSTILE},
            {"event": "recovery", "step": 20, "time": BEGIN, "reason": HOSTILE},
            {"event": "failures", "step": 20, "time": BEGIN, "counts": {HOSTILE: 2}},
            {"event": "x", "step": 20, "time": BEGIN, "advice": HOSTILE},
        )
        with serving(run_dir) as server:
            answer = drawn(server)
        shown = answer["header"] + answer["sections"]
        assert shown.count("&lt;script&gt;") >= 6
        assert not re.search("<script|<img|onerror=alert\\(1\\)>", shown)


def ask_compressed(server, path):
    """The headers of an answer, and its text, as a browser asks for it."""
    address = f"http://127.0.0.1:{server.server_address[1]}{path}"
    asked = urllib.request.Request(address, headers={"Accept-Encoding": "gzip, deflate, br"})
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
        body = answer.read()
    is_compressed = answer.headers["Content-Encoding"] == "gzip"
    return answer.headers, (gzip.decompress(body) if is_compressed else body).decode()


class TestAccess:
    @pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1:8700", "127.0.0.1", "[::1]:9000", "LOCALHOST"])
    def test_a_host_header_of_this_machine_is_accepted(self, run_dir, host):
        with serving(run_dir) as server:
            assert ask(server, "/", host=host)[0] == 200

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8700", "10.0.0.1", "[::2]:1", "x@localhost"],
    )
    def test_a_name_of_another_site_is_refused(self, run_dir, host):
        with serving(run_dir) as server:
            for path in ("/", "/api/run.json", "/api/runs.json", "/api/sections.json"):
                assert ask(server, path, host=host)[0] == 403

    @pytest.mark.parametrize(
        "path",
        [
            "/scaling.jsonl",
            "/../hfscale_status.json",
            "/..%2f..%2fetc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "//etc/passwd",
            "/api",
            "/api/run.json/../../hfscale_status.json",
        ],
    )
    def test_no_path_reaches_a_file(self, run_dir, path):
        with serving(run_dir) as server:
            status, _, body = ask(server, path)
        assert status == 404
        assert body == "there is no such page\n"

    def test_a_run_can_be_named_only_by_its_listed_name(self, run_dir):
        with serving(run_dir) as server:
            assert ask(server, f"/api/run.json?run={run_dir}")[0] == 400
            assert ask(server, "/api/run.json?run=..%2frun")[0] == 400
            assert ask(server, f"/api/sections.json?run={run_dir}")[0] == 400
            assert ask(server, "/api/run.json?run=run&after=x")[0] == 400
            assert ask(server, "/api/run.json?" + "&".join(f"a{n}=1" for n in range(50)))[0] == 400

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "<script>"])
    def test_nothing_can_be_written(self, run_dir, method):
        with serving(run_dir) as server:
            status, _, body = ask(server, "/", method=method)
        assert status in (400, 501)
        assert "<" not in body

    def test_who_sees_the_page_asks_for_a_checkpoint_where_that_is_allowed(self, run_dir):
        wanted = {"X-Hfscale-Action": "save"}
        with serving(run_dir, allows_save=True) as server:
            assert ">Save a checkpoint now</button>" in drawn(server)["header"]
            status, _, body = ask(server, "/api/save?run=run", method="POST", **wanted)
            assert (status, body) == (200, "A checkpoint of the next step is asked for.\n")
            assert (run_dir / "hfscale_save").read_bytes() == b""
            assert "<button" not in drawn(server)["header"]
            assert "is asked for" in drawn(server)["header"]
            assert ask(server, "/api/save?run=run", method="POST", **wanted)[0] == 200  # nothing happens twice

    def test_no_other_request_asks_for_a_checkpoint(self, run_dir):
        wanted = {"X-Hfscale-Action": "save"}
        with serving(run_dir, allows_save=True) as server:
            for expected, path, host, headers in (
                (403, "/api/save?run=run", None, {}),  # as a form of another site sends it
                (403, "/api/save?run=run", None, {"X-Hfscale-Action": "stop"}),
                (403, "/api/save?run=run", "evil.example", wanted),
                (400, "/api/save", None, wanted),
                (400, f"/api/save?run={run_dir}", None, wanted),
                (400, "/api/save?run=..%2frun", None, wanted),
                (404, "/api/run.json?run=run", None, wanted),
                (404, "/", None, wanted),
            ):
                assert ask(server, path, method="POST", host=host, **headers)[0] == expected, path
            assert ask(server, "/api/save?run=run", **wanted)[0] == 404
            assert ask(server, "/api/save?run=run", method="OPTIONS", **wanted)[0] == 501
            assert "Access-Control-Allow-Origin" not in ask(server, "/")[1]
        with serving(run_dir) as server:
            assert ask(server, "/api/save?run=run", method="POST", **wanted)[0] == 501
            assert "<button" not in drawn(server)["header"]
        with serving(run_dir, is_local=False, token=TOKEN, allows_save=True) as server:
            assert ask(server, "/api/save?run=run", method="POST", **wanted)[0] == 401
            known = {"Authorization": f"Bearer {TOKEN}"}
            assert not (run_dir / "hfscale_save").exists()
            assert ask(server, "/api/save?run=run", method="POST", **known, **wanted)[0] == 200
        assert (run_dir / "hfscale_save").exists()

    def test_a_run_that_does_not_go_on_is_not_asked(self, run_dir, tmp_path):
        wanted = {"X-Hfscale-Action": "save"}
        (run_dir / "hfscale_save").symlink_to(tmp_path / "elsewhere")
        with serving(run_dir, allows_save=True) as server:  # no link is followed
            assert ask(server, "/api/save?run=run", method="POST", **wanted)[0] == 503
        assert not (tmp_path / "elsewhere").exists()
        (run_dir / "hfscale_save").unlink()
        (run_dir / "hfscale_status.json").write_text(json.dumps({"status": "completed", "step": 100}))
        with serving(run_dir, allows_save=True) as server:
            assert "<button" not in drawn(server)["header"]
            status, _, body = ask(server, "/api/save?run=run", method="POST", **wanted)
        assert (status, "not going on" in body) == (400, True)
        assert not (run_dir / "hfscale_save").exists()

    def test_every_answer_restricts_the_browser(self, run_dir):
        with serving(run_dir) as server:
            for path in ("/", "/api/run.json", "/api/sections.json", "/nothing"):
                headers = ask(server, path)[1]
                policy = directives(headers["Content-Security-Policy"])
                assert policy["default-src"] == "'none'"
                assert re.fullmatch(r"'sha256-[\w+/]+='", policy["script-src"])
                assert re.fullmatch(r"'sha256-[\w+/]+='", policy["style-src"])
                assert [name for name, value in policy.items() if "unsafe" in value] == ["style-src-attr"]
                assert headers["X-Content-Type-Options"] == "nosniff"
                assert "no-store" in headers["Cache-Control"]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", PAGE)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)

    def test_head_has_no_body(self, run_dir):
        with serving(run_dir) as server:
            assert ask(server, "/", method="HEAD")[::2] == (200, "")

    @pytest.mark.parametrize("path", ["/", "/api/run.json", "/api/runs.json", "/api/sections.json", "/nothing"])
    def test_every_route_needs_the_token(self, run_dir, path):
        with serving(run_dir, is_local=False, token=TOKEN) as server:
            assert ask(server, path)[0] == 401
            assert ask(server, f"{path}?token={TOKEN[:-1]}")[0] == 401
            assert ask(server, path, Authorization=f"Bearer {TOKEN}x")[0] == 401
            assert ask(server, path, Cookie=f"{server.cookie_name}={TOKEN}")[0] == 401
            assert ask(server, path, Authorization=f"Bearer {TOKEN}")[0] == (404 if path == "/nothing" else 200)

    def test_a_token_in_the_address_becomes_a_cookie(self, run_dir):
        with serving(run_dir, is_local=False, token=TOKEN) as server:
            status, headers, body = ask(server, f"/?token={TOKEN}", host="node7:8700")
            assert (status, headers["Location"], body) == (303, "/", "")
            cookie = headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert TOKEN not in cookie
            assert ask(server, "/", host="node7:8700", Cookie=cookie.partition(";")[0])[0] == 200
            status, headers, _ = ask(server, f"//evil.example/?token={TOKEN}")
            assert (status, headers["Location"]) == (303, "/")

    def test_a_damaged_run_does_not_end_the_server(self, run_dir):
        append(
            run_dir / "hfscale_timeline.jsonl",
            {"event": "workload", "step": 1, "time": BEGIN, "usd_per_gpu_hour": "much", "parameters": "many"},
            {"event": "job", "step": 1, "time": "yesterday", "config": [], "trainer": None},
            {"event": "recovery", "step": "x", "time": BEGIN},
        )
        with serving(run_dir) as server:
            status, _, body = ask(server, "/api/run.json?run=run")
            assert status == 200, body
            assert ask(server, "/")[0] == 200
        assert any("left out: 4 values" in note for note in json.loads(body)["summary"]["notes"])

    @pytest.mark.parametrize("wrong", [10**400, -(10**400), 1e308, 1e18, -1, 0, None, True, "x", [1], {}], ids=str_of)
    def test_no_value_in_the_place_of_a_number_hides_the_run(self, run_dir, tmp_path, wrong):
        append(
            run_dir / "hfscale_timeline.jsonl",
            {"event": "recovery", "step": 20, "time": BEGIN, "rank": 0, "steps_lost": 1, "ending_s": 1.0},
            {"event": "alarm", "step": 20, "time": BEGIN, "kind": "hang", "level": "error", "text": "t"},
            {"event": "launch", "step": 20, "time": BEGIN + 220, "previous_alive": BEGIN, "max_steps": 100},
            {
                "event": "workload",
                "step": 10,
                "time": BEGIN,
                "usd_per_gpu_hour": 2.5,
                "parameters": 7,
                "world_size": 4,
            },
            {"event": "end", "step": 20, "time": BEGIN + 400, "seconds": {"training": 100.0}},
        )
        for path in sorted(run_dir.glob("*.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            append(path, *[row | {key: wrong} for row in rows for key in row if key != "event"])
        view = LiveRun(run_dir).view()
        json.dumps(live.describe(view), allow_nan=False)
        assert 'hfscale_tokens_per_s{run="run"}' in exposition({"run": LiveRun(run_dir)})
        assert main(["report", str(run_dir), "--html", str(tmp_path / "report.html")]) == 0


class TestSlowClients:
    def test_neither_many_nor_slow_ones_keep_the_others_out(self, run_dir, monkeypatch):
        monkeypatch.setattr(watch_server, "MAX_CONNECTIONS", 4)
        monkeypatch.setattr(watch_server, "READING_S", 0.5)
        with serving(run_dir, is_local=False, token=TOKEN) as server, ExitStack() as opened:
            slow = []
            for _ in range(12):
                one = opened.enter_context(socket.create_connection(server.server_address[:2], timeout=20))
                one.send(b"GET / HTTP/1.1\r\n")
                slow.append(one)
                assert len(server._connections._opened_at) <= 4
            assert ask(server, "/api/run.json", Authorization=f"Bearer {TOKEN}")[0] == 200
            for one in slow:  # each of them is closed, although it goes on sending
                until = time.monotonic() + 20
                with suppress(OSError):
                    while time.monotonic() < until:
                        one.send(b"a")
                        time.sleep(0.05)
                assert time.monotonic() < until
            assert ask(server, "/api/run.json", Authorization=f"Bearer {TOKEN}")[0] == 200

    def test_one_that_has_the_token_is_not_closed_for_others(self):
        connections = watch_server._Connections()
        connections._most = 2
        (known, others), closed = (socket.socket(), [socket.socket() for _ in range(3)]), []
        connections.add(known)
        connections.is_complete(known, is_known=True)
        for other in others:
            connections.add(other)
            closed += [one for one in (known, *others) if one not in connections._opened_at]
        assert known in connections._opened_at
        assert list(connections._opened_at) == [known, others[-1]]
        for one in (known, *others):
            one.close()


class TestMemory:
    def test_a_part_of_the_file_at_a_time_gives_the_same_records(self, run_dir, monkeypatch):
        append(run_dir / "scaling.jsonl", {"step": 41, "time": BEGIN, "loss": 1.0, "text": "x" * 400}, log(50))
        whole = read_records(run_dir / "scaling.jsonl")
        monkeypatch.setattr(records, "_PART_BYTES", 37)
        assert RecordTail(run_dir / "scaling.jsonl").read()[0] == whole
        run = load_run(run_dir)
        numbers = [{key: float(value) for key, value in row.items() if key != "text"} for row in whole]
        assert [dict(row) for row in run.records] == numbers
        assert run.last("scaling/mfu") == 0.41
        assert run.columns("loss") == ([row["step"] for row in numbers], [row["loss"] for row in numbers])
        assert (run.last("nothing"), run.columns("nothing")) == (None, ([], []))
        assert run.records.keys() == list(dict.fromkeys(key for row in numbers for key in row))

    def test_a_line_without_an_end_is_left_out(self, tmp_path, monkeypatch):
        monkeypatch.setattr(records, "_PART_BYTES", 64)
        monkeypatch.setattr(records, "_LONGEST_LINE_BYTES", 256)
        path = tmp_path / "scaling.jsonl"
        path.write_text('{"step": 1}\n' + "[" * 1000 + '\n{"step": 2}\n')
        assert [record["step"] for record in RecordTail(path).read()[0]] == [1, 2]

    def test_many_records_take_little_memory_and_later_ones_do_not_change_a_view(self):
        rows = RecordRows()
        tracemalloc.start()
        for step in range(5000):
            rows.add({"step": step, **{f"scaling/key_{number}": 0.5 for number in range(20)}})
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert taken < 5000 * 21 * 8 * 1.5
        view = rows.so_far()
        rows.add({"step": 7.0, "loss": 2.0})
        assert (len(view), view.last("step"), view.last("loss")) == (5000, 4999.0, None)
        assert (rows[-1], rows[:2][1]["step"]) == ({"step": 7.0, "loss": 2.0}, 1.0)


class TestCommand:
    @pytest.mark.parametrize(
        ("more", "parts"),
        [
            (["--host", EVERYWHERE], [EVERYWHERE, "--token"]),
            (["--host", EVERYWHERE, "--token", "short"], ["5 characters", "16"]),
            (["--host", "203.0.113.7", "--token", TOKEN], ["--host", "203.0.113.7"]),
            (["--port", "70000"], ["--port", "70000"]),
        ],
    )
    def test_wrong_usage_is_one_line(self, run_dir, capsys, monkeypatch, more, parts):
        monkeypatch.delenv("HFSCALE_WATCH_TOKEN", raising=False)
        assert main(["watch", str(run_dir), *more]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert all(part in line for part in parts)

    def test_no_run_folder_is_one_line(self, tmp_path, capsys):
        assert main(["watch", str(tmp_path / "nothing")]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "nothing is not a directory" in line

    def test_a_port_in_use_is_one_line(self, run_dir, capsys):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert main(["watch", str(run_dir), "--port", str(port)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert str(port) in line

    def test_runs_of_one_name_are_told_apart(self, tmp_path):
        runs = [LiveRun(write_running(tmp_path / part / "out")) for part in ("a", "b")]
        assert live.names_of([*runs, LiveRun(tmp_path)]) == ["out (1)", "out (2)", tmp_path.name]

    def test_a_loopback_server_may_have_a_token_too(self, run_dir):
        with serving(run_dir, token=TOKEN) as server:
            assert ask(server, "/")[0] == 401
            assert ask(server, "/", Authorization=f"Bearer {TOKEN}")[0] == 200
            assert ask(server, "/", host="evil.example", Authorization=f"Bearer {TOKEN}")[0] == 403

    def test_no_token_may_be_short(self, run_dir):
        with pytest.raises(UsageError, match="16"):
            WatchServer({"run": LiveRun(run_dir)}, host="127.0.0.1", port=0, token="short")


def families_of(text):
    """The samples of each family of an exposition, as prometheus_client reads them."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="needs the extra dev")
    return {family.name: family.samples for family in parser.text_string_to_metric_families(text)}


def shown_metrics():
    """The queries of all panels and variables of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [one["query"] for one in dashboard["templating"]["list"]]


class TestMetrics:
    def test_no_run_hides_the_others(self, tmp_path, monkeypatch):
        odd = [write_running(tmp_path / f"run-\udcff{number}") for number in range(2)]
        good = write_running(tmp_path / "good")
        with serving(*odd, good) as server:
            status, _, body = ask(server, "/metrics")
            assert status == 200
            for name in ("good", r"run-\\udcff0", r"run-\\udcff1"):
                assert f'hfscale_step{{run="{name}"}} 40.0' in body
            assert ask(server, "/api/runs.json")[0] == 200
        monkeypatch.setattr(open_metrics, "_state", lambda view: {"step": "x"})
        assert exposition({"good": LiveRun(good)}) == "# EOF\n"  # it is left out with all its lines

    def test_every_line_is_read_by_the_parser_of_prometheus(self, run_dir):
        with serving(run_dir) as server:
            status, headers, text = ask(server, "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        found = {
            (sample.name, *sample.labels.items()): sample.value
            for samples in families_of(text).values()
            for sample in samples
        }
        run = ("run", "run")
        assert found["hfscale_step", run] == 40
        assert found["hfscale_tokens_per_s", run] == 40_000
        assert found["hfscale_loss", run] == 7.0
        assert found["hfscale_seconds_left", run] == 600
        assert found["hfscale_status", run, ("status", "running")] == 1
        assert found["hfscale_status", run, ("status", "failed")] == 0
        assert found["hfscale_rank_compute_s", run, ("rank", "1")] == 2.0
        assert not [name for name, *_ in found if "plan" in name or "temperature" in name]

    def test_it_is_the_format_without_the_parser_too(self, run_dir):
        text = exposition({"run": LiveRun(run_dir)})
        *lines, last = text.splitlines()
        assert last == "# EOF"
        sample = re.compile(r'hfscale_[a-z0-9_]+\{run="run"(,[a-z]+="[a-z0-9]+")?\} -?[0-9.e+-]+')
        assert [line for line in lines if not line.startswith("# ") and not sample.fullmatch(line)] == []
        assert len(lines) > 50

    def test_the_text_of_a_run_stays_in_its_label(self, tmp_path):
        run = LiveRun(write_running(tmp_path / "run"))
        hostile = 'a"} 1\nhfscale_step{run="b\\'
        steps = families_of(exposition({hostile: run}))["hfscale_step"]
        assert [(sample.labels, sample.value) for sample in steps] == [({"run": hostile}, 40.0)]

    def test_keys_that_are_not_of_hfscale_are_not_exported(self, run_dir):
        keys = {"evil\nhfscale_step 1": 1.0, "scaling/x y": 1.0, "other/key": 1.0, "scaling/new_key": 2.0}
        append(run_dir / "scaling.jsonl", log(50, **keys))
        text = exposition({"run": LiveRun(run_dir)})
        assert "hfscale_new_key" in text
        assert not re.search("evil|x y|other.key", text)

    def test_a_run_without_a_number_has_no_sample_of_it(self, tmp_path):
        (tmp_path / "new").mkdir()
        text = exposition({"new": LiveRun(tmp_path / "new")})
        assert set(re.findall(r"^hfscale_\w+", text, re.MULTILINE)) == {
            "hfscale_status",
            "hfscale_checkpoints",
            "hfscale_alarms",
        }

    def test_two_runs_share_each_family(self, tmp_path):
        runs = {name: LiveRun(write_running(tmp_path / name)) for name in ("a", "b")}
        steps = families_of(exposition(runs))["hfscale_step"]
        assert [sample.labels["run"] for sample in steps] == ["a", "b"]

    def test_a_run_that_cannot_be_read_is_left_out(self, run_dir, tmp_path, caplog):
        runs = {"good": LiveRun(run_dir), "bad": LiveRun(write_running(tmp_path / "bad"))}
        (tmp_path / "bad" / "scaling.jsonl").unlink()
        (tmp_path / "bad" / "scaling.jsonl").symlink_to("scaling.jsonl")
        with caplog.at_level("WARNING", logger="hfscale"):
            text = exposition(runs)
        assert (text.count('run="good"') > 20, text.count('run="bad"')) == (True, 0)
        assert [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]

    def test_each_metric_of_the_dashboard_is_exported(self, tmp_path):
        run_dir = write_running(tmp_path / "run")
        keys = set(
            re.findall(r"\| `([a-z_]+/[a-z_]+)` \|", f"{ScalingMetricsCallback.__doc__}{CommHealthCallback.__doc__}")
        )
        exported = {f"hfscale_{metric_name(key)}" for key in keys} | {f"hfscale_{name}" for name in DESCRIPTIONS}
        exported |= set(re.findall(r"^hfscale_\w+", exposition({"run": LiveRun(run_dir)}), re.MULTILINE))
        queried = {name for query in shown_metrics() for name in re.findall(r"hfscale_\w+", query)}
        assert len(queried) > 15
        assert queried - exported == set()

    def test_the_dashboard_has_what_grafana_needs_to_import_it(self):
        dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
        assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert place["x"] + place["w"] <= 24
            assert not cells & taken
            taken |= cells
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            for target in panel["targets"]:
                assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"

    def test_the_textfile_is_replaced_in_one_step_and_again(self, tmp_path, run_dir, no_refresh_limit, monkeypatch):
        monkeypatch.setattr(open_metrics, "TEXTFILE_EVERY_S", 0.0)
        path = tmp_path / "hfscale.prom"
        textfile = Textfile(path, {"run": LiveRun(run_dir)})
        textfile.write()
        before = path.stat().st_ino
        append(run_dir / "scaling.jsonl", log(50))
        textfile.write_if_due()
        assert path.stat().st_ino != before
        assert 'hfscale_step{run="run"} 50.0' in path.read_text()
        assert [one.name for one in tmp_path.glob("*prom*")] == ["hfscale.prom"]

    def test_a_server_writes_its_textfile(self, tmp_path, run_dir):
        runs = {"run": LiveRun(run_dir)}
        path = tmp_path / "hfscale.prom"
        with WatchServer(runs, host="127.0.0.1", port=0, textfile=Textfile(path, runs)) as server:
            server.service_actions()
        assert path.read_text().endswith("# EOF\n")

    def test_a_folder_that_goes_away_is_one_warning(self, tmp_path, run_dir, monkeypatch, caplog):
        monkeypatch.setattr(open_metrics, "TEXTFILE_EVERY_S", 0.0)
        textfile = Textfile(tmp_path / "gone" / "hfscale.prom", {"run": LiveRun(run_dir)})
        for _ in range(3):
            textfile.write_if_due()
        assert len([record for record in caplog.records if "textfile" in record.message]) == 1

    @pytest.mark.parametrize(("name", "code", "part"), [("x.txt", 2, ".prom"), ("gone/x.prom", 1, "--textfile")])
    def test_a_textfile_that_cannot_be_read_or_written_is_one_line(self, tmp_path, run_dir, capsys, name, code, part):
        assert main(["watch", str(run_dir), "--port", "0", "--textfile", str(tmp_path / name)]) == code
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert part in line


@needs_browser
def test_a_browser_shows_the_run_while_it_goes_on(tmp_path, no_refresh_limit):
    """The second time the page asks, the run has gone on; and no text of the run is interpreted."""
    folder = write_running(tmp_path / "run")
    status = {"status": "running", "step": 40, "checkpoint": None, "reason": HOSTILE}
    (folder / "hfscale_status.json").write_text(json.dumps(status))
    asked = []

    class Growing(LiveRun):
        def view(self):
            asked.append(1)
            if len(asked) == 3:
                append(folder / "scaling.jsonl", log(50))
            return super().view()

    with WatchServer({HOSTILE: Growing(folder)}, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        dom = subprocess.run(
            browser_command(tmp_path / "profile", "--virtual-time-budget=20000", "--dump-dom", server.url),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        server.shutdown()
        thread.join()
    assert len(asked) >= 3
    assert "step 50 of 100" in dom
    assert "Time left" in dom
    assert dom.count('class="line"') >= 4
    assert dom.count("<rect") == 2 * 2 * 4
    assert "&lt;script&gt;document.title" in dom
    assert "<img" not in dom
    assert not re.search(r"<title>owned", dom)
    assert ">Not updated" not in dom
