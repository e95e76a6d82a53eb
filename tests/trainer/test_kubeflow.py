"""Progress of a Kubeflow TrainJob: the callback of transformers sends it, with the metrics of hfscale, to a server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tiny import tiny_trainer

from hfscale import ScalingCallback
from hfscale.core.versions import is_at_least


@pytest.mark.skipif(not is_at_least("transformers", "5.23"), reason="Trainer has the callback from 5.23 on")
def test_the_status_of_a_trainjob_has_progress_and_the_metrics_of_hfscale(tmp_path, monkeypatch):
    received = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.headers["Authorization"], json.loads(content)["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    (tmp_path / "token").write_text("secret\n")
    with HTTPServer(("127.0.0.1", 0), Controller) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
            tiny_trainer(tmp_path / "out", ScalingCallback(), report_to=["kubeflow"]).train()
        finally:
            server.shutdown()
            thread.join()
    assert {token for token, _ in received} == {"Bearer secret"}
    statuses = [status for _, status in received]
    assert [statuses[0]["progressPercentage"], statuses[-1]["progressPercentage"]] == [0, 100]
    metrics = {metric["name"]: float(metric["value"]) for metric in statuses[-1]["metrics"]}
    assert metrics["scaling/tokens_per_s"] > 0
    assert "loss" in metrics
