"""TRL's trainers that generate with vLLM: without vLLM or its server every rank ends in one line before step 1."""

import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from datasets import Dataset
from forked_ranks import run_ranks
from tiny import tiny_model, tiny_tokenizer

from hfscale import ScalingCallback
from hfscale.errors import MissingDependencyError, ParameterError
from hfscale.trainer.generation_server import servers_of

trl = pytest.importorskip("trl")
PLAIN = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1, "per_device_train_batch_size": 2}
INJECTED = {
    "rollout_worker": SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue()),
    "weight_transfer": SimpleNamespace(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server():
    """A server that answers as one of vLLM does that is ready."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    serving = HTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()


def reward(completions, **kwargs):
    return [0.0 for _ in completions]


def make(kind, model, folder, arguments, given=None):
    """Return a Trainer of TRL with a callback of hfscale."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    config, trainer = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
        "async": (AsyncGRPOConfig, AsyncGRPOTrainer),
    }[kind]
    return trainer(
        model=model,
        reward_funcs=[reward],
        args=config(output_dir=str(folder), num_generations=2, **PLAIN, **arguments),
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3", "w4"] * 4}),
        callbacks=[ScalingCallback()],
        **(given or {}),
    )


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("grpo", {"use_vllm": True}, "use_vllm"),
        ("rloo", {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0}, "use_vllm"),
        ("async", {}, "AsyncGRPOConfig"),
    ],
)
def test_a_missing_vllm_is_named(model, tmp_path, kind, arguments, named):
    with pytest.raises(MissingDependencyError, match=rf"{named}.* vLLM.* pip install"):
        make(kind, model, tmp_path, arguments)


@pytest.mark.parametrize(
    ("url", "rule"),
    [("http://127.0.0.1:9", "vllm serve"), ("localhost:8000", "http://localhost:8000"), ("http://", "address")],
)
def test_a_missing_server_is_named(model, tmp_path, url, rule):
    arguments = {"vllm_server_base_url": url, "vllm_server_timeout": 0.1}
    with pytest.raises(ParameterError, match=f"vllm_server_base_url.*{url}.*{rule}"):
        make("async", model, tmp_path, arguments, INJECTED)


def test_a_server_that_takes_no_weights_is_named(model, tmp_path, server, monkeypatch):
    monkeypatch.setattr("hfscale.trainer.generation_server._vllm_is_installed", lambda: True)
    arguments = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server}
    with pytest.raises(ParameterError, match=r"no /get_world_size: .*VLLM_SERVER_DEV_MODE"):
        make("grpo", model, tmp_path, arguments)


def test_what_is_there_or_not_asked_is_not_refused(model, tmp_path, server, monkeypatch):
    # TRL reads the name of a GPU here
    monkeypatch.setattr(
        "trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *given: None
    )
    make("async", model, tmp_path, {"vllm_server_base_url": server, "vllm_server_timeout": 0.1}, INJECTED)
    make("async", model, tmp_path, {"vllm_server_base_url": "http://127.0.0.1:9", "token_budget": 64}, INJECTED)


@pytest.mark.world(2)
def test_every_rank_is_told(model, tmp_path):
    arguments = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.1}
    codes = run_ranks(
        2, make, "async", model, tmp_path, arguments, INJECTED, log=tmp_path / "log", timeout_s=60, ends_all=False
    )
    printed = [path.read_text() for path in sorted((tmp_path / "log").iterdir())]
    assert 0 not in codes
    assert all("vllm_server_base_url" in text.splitlines()[-1] for text in printed), printed


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ({"use_vllm": False, "vllm_mode": "server"}, []),
        ({"use_vllm": True, "vllm_mode": "colocate"}, []),
        ({"use_vllm": True, "vllm_mode": "server"}, ["http://gpu-1:8000"]),
        ({"use_teacher_server": False, "teacher_model_server_url": "http://a"}, []),
        ({"teacher_model_server_url": "http://a"}, ["http://a"]),
        ({"teacher_server_urls": {"a": "http://a", "b": "http://b"}}, ["http://a", "http://b"]),
    ],
)
def test_the_servers_that_are_asked(arguments, asked):
    server = {"vllm_server_base_url": None, "vllm_server_host": "gpu-1", "vllm_server_port": 8000}
    if "use_vllm" not in arguments:
        server = {}
    assert [found.url for found in servers_of(SimpleNamespace(**server, **arguments), {})] == asked
