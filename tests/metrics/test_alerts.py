"""`AlertCallback`: what it posts, and that no receiver can disturb the training. The receivers are on loopback."""

import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from ports import free_port
from tiny import tiny_model, tiny_trainer

from hfscale import AlertCallback, ScalingCallback, SpotCheckpointCallback
from hfscale.core import best_effort
from hfscale.core.alarms import HEALTH, LOSS, listen, raise_alarm
from hfscale.core.records import read_events
from hfscale.errors import ParameterError
from hfscale.health import node
from hfscale.metrics import alerts
from hfscale.report.run_data import load_run

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"  # noqa: S105


class Receiver(ThreadingHTTPServer):
    """Keeps the messages that it receives; `answers` decides about its answer."""

    daemon_threads = True

    def __init__(self, status=200):
        super().__init__(("127.0.0.1", 0), _Receiving)
        self.status = status
        self.messages = []
        self.answered = 0
        self.received = threading.Condition()
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/hook/{SECRET}"

    def wait_for(self, kind):
        """The first message of a kind."""
        with self.received:
            assert self.received.wait_for(lambda: kind in [one["kind"] for one in self.messages], timeout=60)
        return next(one for one in self.messages if one["kind"] == kind)


class _Receiving(BaseHTTPRequestHandler):
    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.received:
            self.server.messages.append(message)
            self.server.received.notify_all()
        self.server.may_answer.wait(60)
        self.server.answered += 1
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self):
        with self.server.received:
            self.server.messages.append({"kind": "a redirect was followed"})
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def receiving(status=200):
    server = Receiver(status)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def each_test_warns_anew(monkeypatch):
    monkeypatch.setattr(best_effort, "_warned", {})


def train(folder, url, *callbacks, **options):
    """Train four steps with an AlertCallback, and return the Trainer."""
    scaling = ScalingCallback(spot_checkpoint=SpotCheckpointCallback(on_preemption="return"))
    trainer = tiny_trainer(folder, scaling, AlertCallback(webhook=url), *callbacks, **options)
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer


def test_the_end_is_one_message(tmp_path):
    with receiving() as receiver:
        train(tmp_path / "run-1", receiver.url)
        message = receiver.wait_for("end")
        assert [one["kind"] for one in receiver.messages] == ["end"]
    assert message.keys() == {"kind", "level", "text", "step", "time", "run", "host"}
    assert (message["level"], message["step"], message["run"]) == ("note", 4, "run-1")
    assert "completed" in message["text"]


def test_a_restart_is_one_message_and_an_alarm_of_the_run(tmp_path):
    with receiving() as receiver:
        train(tmp_path, receiver.url, save_strategy="steps", save_steps=2, max_steps=2)
        receiver.wait_for("end")
        # As if the first launch had been killed: a training that continues a complete one is no restart
        timeline = tmp_path / "hfscale_timeline.jsonl"
        events = [line for line in timeline.read_text().splitlines(keepends=True) if '"event": "end"' not in line]
        timeline.write_text("".join(events))
        train(tmp_path, receiver.url, max_steps=3, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        message = receiver.wait_for("restart")
    assert message["step"] == 2
    assert "launch 2" in message["text"]
    assert "restart" in [alarm["kind"] for alarm in load_run(tmp_path).alarms]


def test_a_preemption_and_its_end_are_messages(tmp_path):
    tmp_path.joinpath("hfscale_stop").touch()
    with receiving() as receiver:
        train(tmp_path, receiver.url, save_strategy="steps", save_steps=100, max_steps=100)
        message = receiver.wait_for("preemption")
        assert "saves it" in message["text"]
        assert "preempted" in receiver.wait_for("end")["text"]
    assert [event["kind"] for event in read_events(tmp_path) if event["event"] == "alarm"][:1] == ["preemption"]


def test_a_failed_run_ends_with_an_error_without_secrets(tmp_path):
    class Failing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_model()
            self.config = self.inner.config

        def forward(self, input_ids=None, labels=None):
            raise RuntimeError(f"no access with {SECRET}")

    with receiving() as receiver:
        with pytest.raises(RuntimeError):
            train(tmp_path, receiver.url, model=Failing())
        message = receiver.wait_for("end")
    assert message["level"] == "error"
    assert "RuntimeError: no access with [redacted]" in message["text"]


def test_a_jump_of_the_loss_is_one_message(tmp_path):
    class Jumping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_model()
            self.config = self.inner.config
            self.calls = 0

        def forward(self, input_ids=None, labels=None):
            output = self.inner(input_ids=input_ids, labels=labels)
            self.calls += 1
            if self.calls in (14, 15):
                output.loss = output.loss * 100
            return output

    with receiving() as receiver:
        train(tmp_path, receiver.url, model=Jumping(), max_steps=16)
        receiver.wait_for("end")
        kinds = [one["kind"] for one in receiver.messages]
        message = receiver.wait_for("loss")
    assert kinds == ["loss", "end"]  # the second jump is logged only
    assert message["step"] == 14
    assert "jumps" in message["text"]


def test_a_disk_that_is_nearly_full_is_one_message(tmp_path, monkeypatch):
    free = iter([2**60])
    monkeypatch.setattr(node, "free_bytes", lambda folder: next(free, 1000))
    with receiving() as receiver:
        train(tmp_path, receiver.url, save_strategy="steps", save_steps=1, max_steps=3)
        message = receiver.wait_for("disk")
        receiver.wait_for("end")
        assert [one["kind"] for one in receiver.messages].count("disk") == 1
    assert "0.0 GiB are free" in message["text"]


def test_a_disk_that_does_not_answer_does_not_end_the_training(tmp_path, monkeypatch):
    """The first two questions are those of the checks at the start."""
    free = iter([2**60, 2**60])

    def free_bytes(folder):
        answer = next(free, None)
        if answer is None:
            raise OSError("the file system is away")
        return answer

    monkeypatch.setattr(node, "free_bytes", free_bytes)
    trainer = tiny_trainer(tmp_path, ScalingCallback(), save_strategy="steps", save_steps=1, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert load_run(tmp_path).failures["checking the room on the disk"] >= 1


@pytest.mark.parametrize("status", [500, 302, 404])
def test_a_receiver_that_fails_is_one_warning(tmp_path, caplog, status):
    caplog.set_level(logging.WARNING, "hfscale")
    with receiving(status) as receiver:
        tmp_path.joinpath("hfscale_stop").touch()
        trainer = train(tmp_path, receiver.url, max_steps=4)
        receiver.wait_for("end")
        sender = alerts._Sender(receiver.url, run="run")
        sender.take(alerts.Alarm(kind=LOSS, text="x", step=1))
        sender.settle(60)
        sender.stop()
        assert not [one for one in receiver.messages if "redirect" in one["kind"]]
    assert trainer.state.global_step > 0
    lines = [record.getMessage() for record in caplog.records if "sending an alert" in record.getMessage()]
    assert len(lines) == 1
    assert SECRET not in lines[0]


def test_a_receiver_that_does_not_answer_costs_the_training_nothing(tmp_path):
    with receiving() as receiver:
        receiver.may_answer.clear()
        trainer = train(tmp_path, receiver.url, max_steps=4)  # it returns while the receiver has not answered
        assert trainer.state.global_step == 4
        assert not receiver.may_answer.is_set()
        receiver.wait_for("end")


def test_a_receiver_that_is_away_costs_the_training_nothing(tmp_path):
    assert train(tmp_path, f"http://127.0.0.1:{free_port()}/").state.global_step == 4


def test_messages_beyond_the_limit_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(alerts, "MAX_WAITING", 3)
    with receiving() as receiver:
        receiver.may_answer.clear()
        sender = alerts._Sender(receiver.url, run="run")
        sender.take(alerts.Alarm(kind=LOSS, text="first", step=0))
        receiver.wait_for("loss")  # the thread waits for its answer now
        for step in range(1, 10):
            sender.take(alerts.Alarm(kind=LOSS, text="later", step=step))
        receiver.may_answer.set()
        sender.settle(60)
        assert [one["step"] for one in receiver.messages] == [0, 1, 2, 3]
        sender.stop()


ENDS = """
import sys
from hfscale.core.alarms import END, raise_alarm
from hfscale.metrics import alerts

alerts.END_S = float(sys.argv[2])
alerts.POST_S = 200.0  # longer than the receiver takes
sender = alerts._Sender(sys.argv[1], run="run")
raise_alarm(END, "it ends", step=1)
"""


@pytest.mark.long
def test_the_process_waits_for_the_last_message_but_not_for_long(python):
    with receiving() as receiver:
        assert python("-c", ENDS, receiver.url, "60").code == 0
        assert [one["text"] for one in receiver.messages] == ["it ends"]
        receiver.may_answer.clear()
        assert python("-c", ENDS, receiver.url, "0.1").code == 0
        assert receiver.answered <= 1, "the process has waited for the second answer"


def test_after_the_training_nothing_is_sent(tmp_path):
    with receiving() as receiver:
        train(tmp_path, receiver.url)
        receiver.wait_for("end")
        raise_alarm(LOSS, "of another training", step=1)
        train(tmp_path / "second", receiver.url, max_steps=1)
        with receiver.received:
            receiver.received.wait_for(lambda: len(receiver.messages) == 2, timeout=60)
        assert [one["run"] for one in receiver.messages] == [tmp_path.name, "second"]


def test_only_errors_of_the_other_health_checks_are_sent():
    with receiving() as receiver:
        sender = alerts._Sender(receiver.url, run="run")
        raise_alarm(HEALTH, "a rank is slow", step=1)
        raise_alarm(HEALTH, "a rank computes wrongly", step=2, level="error")
        sender.settle(60)
        sender.stop()
        assert [one["step"] for one in receiver.messages] == [2]


def test_a_listener_that_fails_does_not_disturb_the_others():
    heard = []

    def fails(alarm):
        raise OSError("broken")

    ends = [listen(fails), listen(heard.append)]
    raise_alarm(LOSS, "it jumps", step=3)
    for end in ends:
        end()
    raise_alarm(LOSS, "later", step=4)
    assert [alarm.step for alarm in heard] == [3]


@pytest.mark.parametrize("webhook", ["file:///etc/passwd", "ftp://x/y", "hooks.example.com/secret", "https://", ""])
def test_only_web_addresses_are_taken_and_the_rest_is_not_printed(webhook):
    with pytest.raises(ParameterError, match="webhook") as raised:
        AlertCallback(webhook=webhook)
    assert "secret" not in str(raised.value)
    assert "passwd" not in str(raised.value)


ODD = {
    "letters beyond ASCII": "{base}/ü/SECRET?q=ä ö",
    "space": "{base}/SECRET x",
    "a percent sign": "{base}/100%/SECRET",
    "white space around it": "  {base}/SECRET\n",
    "a fragment": "{base}/SECRET#here",
}
REFUSED = [
    "https://hooks..example/SECRET",
    f"https://{'a' * 70}.example/SECRET",
    "http://127.0.0.1:port/SECRET",
    "http://127.0.0.1:99999/SECRET",
    "http://127.0.0.1:0/SECRET",
    "http://SECRET@/x",
    "https://me:SECRET@127.0.0.1/ok",
    "https://SECRET@host/ok",
    "http://[::1/SECRET",
    "http://[SECRET]/x",
    "http://exa mple/SECRET",
    "http://h\nost/SECRET",
    "http://host/SECRET\r\nX-Other: 1",
    "http://ho%00st/SECRET",
    "http://host\\@evil/SECRET",
    "http://host/SECRET\udcff",
    b"http://host/SECRET",
]


def test_odd_addresses_are_sent_as_http_allows(caplog):
    with receiving(status=403) as receiver:
        base = receiver.url.partition("/hook")[0]
        for name, url in ODD.items():
            sender = alerts._Sender(url.format(base=base), run="run")
            for text in ("one", "two"):
                sender.take(alerts.Alarm(kind=LOSS, text=text, step=1))
            sender.settle(60)
            sender.stop()
            assert [one["text"] for one in receiver.messages] == ["one", "two"], name
            receiver.messages.clear()
        assert receiver.answered == 2 * len(ODD)
    assert "HTTPError 403" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("url", REFUSED)
def test_addresses_that_cannot_be_sent_to_are_refused_without_their_secret(url):
    with pytest.raises(ParameterError, match="webhook") as raised:
        AlertCallback(webhook=url)
    assert "SECRET" not in str(raised.value)


def test_no_error_of_a_message_ends_the_thread_that_sends(caplog, monkeypatch):
    with receiving() as receiver:
        sender = alerts._Sender(receiver.url, run="run")
        with monkeypatch.context() as broken:
            broken.setattr(alerts, "redact_json", lambda message: {}[SECRET])
            sender.take(alerts.Alarm(kind=LOSS, text="lost", step=1))
            sender.settle(60)
        sender.take(alerts.Alarm(kind=LOSS, text="sent", step=2))
        sender.settle(60)
        sender.stop()
        assert [one["text"] for one in receiver.messages] == ["sent"]
    assert "KeyError" in caplog.text
    assert SECRET not in caplog.text


def test_the_address_is_not_in_the_files_of_the_run(tmp_path):
    with receiving() as receiver:
        train(tmp_path, receiver.url, save_strategy="steps", save_steps=2)
        receiver.wait_for("end")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
