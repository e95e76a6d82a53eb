"""Makes the pictures of `hfscale watch` in docs/images, from a run of 60 steps that is written for them.

    python docs/screenshots.py

It needs Chromium, and takes the place of nothing else: the run is at step 36 of 60 on two GPUs.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from hfscale.report.watch.live import LiveRun
from hfscale.report.watch.server import WatchServer

IMAGES = Path(__file__).parent / "images"
SIZES = {"watch-1280.png": (1280, 1500), "watch-400.png": (400, 1500)}
"""Name, width and height of each picture."""
STEP_S = 12.0


def write_run(folder: Path) -> None:
    """Write the files of a run that was preempted once and is going on.

    Args:
        folder (`Path`): the output directory; it must not exist.
    """
    folder.mkdir(parents=True)
    begun = time.time() - 36 * STEP_S - 185

    def append(name: str, *rows: dict[str, object]) -> None:
        with (folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    launch = {"event": "launch", "world_size": 2, "max_steps": 60}
    alarm = {"event": "alarm", "step": 20, "kind": "preemption", "level": "warning"}
    text = "SIGTERM, 30 s left: every process stops after step 20 and saves it"
    append(
        "hfscale_timeline.jsonl",
        launch | {"step": 0, "time": begun},
        {"event": "workload", "step": 2, "time": begun + 60, "model_type": "llama", "parameters": 8_030_261_248}
        | {"world_size": 2, "strategy": "fsdp2", "global_batch_size": 16, "sequence_length": 8192, "precision": "bf16"}
        | {"device": "NVIDIA H100 80GB HBM3", "usd_per_gpu_hour": 2.5},
        {"event": "save", "step": 20, "time": begun + 290, "seconds": 4.0},
        alarm | {"time": begun + 288, "text": text},
        launch | {"step": 20, "time": begun + 390, "previous_alive": begun + 295},
    )
    for step in range(2, 37, 2):
        at = begun + 50 + step * STEP_S + (130 if step > 20 else 0)
        waits = 0.02 if step < 26 else 0.14
        append(
            "scaling.jsonl",
            {"step": step, "time": at, "loss": 1.6 + 2.4 / (1 + step / 6), "learning_rate": min(step, 10) * 2e-6}
            | {"scaling/tokens_per_s": 10_900.0 * (1 - waits), "scaling/tokens_per_s_per_gpu": 5450.0 * (1 - waits)}
            | {"scaling/tokens_seen": step * 131_072, "scaling/mfu": 0.31 * (1 - waits), "scaling/hfu": 0.41}
            | {"scaling/goodput": 0.7, "scaling/usd": (at - begun) * 5 / 3600, "scaling/data_wait_fraction": waits},
        )
        append(
            "hfscale_ranks.jsonl",
            {
                "step": step,
                "data_wait_fraction": [0.01, waits],
                "compute_s": [10.1, 10.3],
                "temperature_c": [61, 66.0],
            },
        )
    status = {"status": "running", "step": 36, "checkpoint": "checkpoint-20", "reason": None}
    (folder / "hfscale_status.json").write_text(json.dumps(status), encoding="utf-8")


def main() -> int:
    """Make the pictures; return 1 if there is no browser."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("Chromium is not installed: apt-get install chromium\n")
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        write_run(Path(temporary) / "llama-3.1-8b")
        runs = {"llama-3.1-8b": LiveRun(Path(temporary) / "llama-3.1-8b")}
        with WatchServer(runs, host="127.0.0.1", port=0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for name, (width, height) in SIZES.items():
                options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                options += [f"--user-data-dir={temporary}/profile", "--virtual-time-budget=4000"]
                options += [f"--window-size={width},{height}", f"--screenshot={IMAGES / name}", server.url]
                subprocess.run([browser, *options], check=True, timeout=120, capture_output=True)  # noqa: S603
            server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
