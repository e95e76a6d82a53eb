"""`AlertCallback`: sends the alarms of a run to a webhook, in the background."""

import atexit
import json
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from hfscale.core.alarms import HEALTH, Alarm, listen
from hfscale.core.best_effort import count_failure
from hfscale.core.options import takes_options
from hfscale.core.redaction import redact_json
from hfscale.metrics.added_options import AlertOptions
from hfscale.metrics.webhook import Webhook
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter

POST_S = 10.0
"""Seconds that the receiver has to answer."""
END_S = 5.0
"""Seconds for which the end of the process waits for messages that are not sent yet."""
MAX_WAITING = 100
"""Number of messages that wait for a slow receiver; later ones are dropped and counted."""
POSTING = "sending an alert"
"""Name of this work in warnings."""


class AlertCallback(AdapterCallback):
    """Posts one JSON object to a URL for each alarm: `callbacks=[ScalingCallback(), AlertCallback(webhook=...)]`.

    The parts of `ScalingCallback` raise the alarms; without it there are none. The main process sends them, for a hang
    the process that reports it, in a thread of its own: a receiver that is slow, fails or is away costs the training
    nothing and is one warning. Only the end of the process waits for messages that are not sent yet, at most five
    seconds. The callback logs no metric keys.

    | kind | when |
    |---|---|
    | `hang` | the ranks make no progress, with the rank that the others wait for |
    | `loss` | the loss jumps, or is not finite |
    | `preemption` | the ranks agree to stop after a preemption notice |
    | `restart` | a later launch of the run begins |
    | `disk` | two checkpoints do not fit on the disk any more |
    | `end` | the run is completed, preempted or failed |
    | `health` | a rank computes or communicates wrongly |

    Each object has `kind`, `level` (`note`, `warning`, `error`), `text`, `step`, `time` (Unix seconds), `run` (the
    name of the output directory) and `host`. Secrets are redacted. Redirects are not followed.

    Args:
        **options: the options, see below.

    Raises:
        ParameterError: it is no such URL.
    """

    @takes_options(AlertOptions)
    def __init__(self, options: AlertOptions) -> None:
        self.options = options
        self._begin_run()

    def _begin_run(self) -> None:
        self._sender: _Sender | None = None

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Listen before the other callbacks begin, and until they have reported how the training ended."""
        self._start(adapter)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._sender is None:  # the callback was added after the Trainer was made
            self._start(TrainerAdapter.current())

    def _start(self, adapter: TrainerAdapter) -> None:
        self._sender = _Sender(
            self.options.webhook, run=adapter.checkpoints.run_dir().resolve().name
        )
        adapter.at_training_end(self._stop)

    def _stop(self) -> None:
        if self._sender is not None:
            self._sender.stop()
            self._sender = None


class _Sender:
    """Sends alarms to a URL from a thread.

    Args:
        webhook (`str`): the URL.
        run (`str`): the name of the run.
    """

    def __init__(self, webhook: str, *, run: str) -> None:
        self._run = run
        self._webhook = Webhook(webhook)
        self._where = self._webhook.host
        self._waiting: queue.Queue[Alarm | None] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._send_all, name="hfscale-alerts", daemon=True).start()
        atexit.register(self.settle, END_S)
        self._end_listening = listen(self.take, self.settle)

    def stop(self) -> None:
        """Take no further alarms; those that wait are sent."""
        self._end_listening()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def take(self, alarm: Alarm) -> None:
        """Send an alarm in the background.

        Args:
            alarm (`Alarm`): what happened.
        """
        if alarm.kind == HEALTH and alarm.level != "error":
            return
        try:
            self._waiting.put_nowait(alarm)
        except queue.Full as error:
            count_failure(POSTING, self._where, error)

    def settle(self, limit_s: float) -> None:
        """Wait until nothing waits any more, at most so many seconds.

        Args:
            limit_s (`float`): the longest time, seconds.
        """
        until = time.monotonic() + limit_s
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return
                self._waiting.all_tasks_done.wait(left_s)

    def _send_all(self) -> None:
        while True:
            alarm = self._waiting.get()
            if alarm is None:
                self._waiting.task_done()
                atexit.unregister(self.settle)
                return
            try:
                self._post(alarm)
            except ConnectionError as error:  # it repeats nothing of the URL
                count_failure(POSTING, self._where, error)
            except Exception as error:  # the alarms after this one must be sent
                count_failure(POSTING, self._where, RuntimeError(type(error).__name__))
            finally:
                self._waiting.task_done()

    def _post(self, alarm: Alarm) -> None:
        message = {
            "kind": alarm.kind,
            "level": alarm.level,
            "text": alarm.text,
            "step": alarm.step,
            "time": alarm.time,
            "run": self._run,
            "host": socket.gethostname(),
        }
        text = json.dumps(redact_json(message))
        self._webhook.post(text.encode(), POST_S)
