"""The report: its content for a known run, its page in a real browser, and that hostile files do no harm."""

import json
import re
import subprocess
from html.parser import HTMLParser

import pytest
from browser import browser_command, needs_browser

import hfscale
from hfscale.cli import main
from hfscale.errors import UsageError
from hfscale.facts.models import catalogue
from hfscale.planner.memory import allocated_gib
from hfscale.report.formatting import count, duration, percent, size, usd
from hfscale.report.html import Series, heat_map, line_chart, thin, ticks
from hfscale.report.page import page
from hfscale.report.prediction import predict
from hfscale.report.run_data import load_run
from hfscale.report.summary import bottlenecks, headline, subtitle

BEGIN = 1_790_000_000.0
WORKLOAD = {
    "model_type": "llama",
    "parameters": 8_030_261_248,
    "trainable_parameters": 8_030_261_248,
    "device": "NVIDIA H100",
    "sequence_length": 8192,
    "tokens_per_gpu": 16384,
    "precision": "bf16",
    "recompute": "none",
    "world_size": 4,
    "strategy": "fsdp2",
    "global_batch_size": 8,
    "usd_per_gpu_hour": 2.5,
}
SPLIT = {"compute": 600.0, "data_wait": 200.0, "save": 20.0, "start_up": 30.0, "lost": 40.0, "down": 110.0}


def write_run(folder, **changed):
    """Write the files of a run that was killed at step 70, resumed from step 50 and completed at step 100.

    Rank 3 reads its data slowly.
    """

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    records = [
        {
            "step": step,
            "time": BEGIN + 10 * step,
            "loss": 9 - step / 20,
            "scaling/tokens_per_s": 40_000.0,
            "scaling/tokens_per_s_per_gpu": 10_000.0,
            "scaling/tokens_seen": step * 65536,
            "scaling/mfu": 0.41,
            "scaling/hfu": 0.41,
            "scaling/data_wait_fraction": 0.25,
            "scaling/comm_fraction": 0.1,
            "scaling/goodput": 0.6,
            "scaling/usd": 2.75,
            "scaling/usd_per_million_tokens": 0.42,
            "gpu/memory_peak_gib": 61.0,
            "checkpoint/stall_s": 8.0,
        }
        for step in range(10, 101, 10)
    ]
    events = [
        {"event": "launch", "step": 0, "time": BEGIN, "world_size": 4, "strategy": "fsdp2"},
        {"event": "workload", "step": 10, "time": BEGIN + 100, **WORKLOAD},
        {"event": "save", "step": 50, "time": BEGIN + 500, "seconds": 8.0},
        {"event": "launch", "step": 50, "time": BEGIN + 650, "world_size": 4, "previous_alive": BEGIN + 540},
        {"event": "save", "step": 100, "time": BEGIN + 990, "seconds": 12.0},
        {"event": "end", "step": 100, "time": BEGIN + 1000, "seconds": SPLIT},
    ]
    ranks = [
        {"step": step, "time": BEGIN, "data_wait_fraction": [0.01, 0.012, 0.011, 0.25]} for step in range(10, 101, 10)
    ]
    write("scaling.jsonl", changed.get("records", records))
    write("hfscale_timeline.jsonl", changed.get("events", events))
    write("hfscale_ranks.jsonl", ranks)
    status = {"status": "completed", "step": 100, "checkpoint": "checkpoint-100", "reason": None}
    (folder / "hfscale_status.json").write_text(json.dumps(changed.get("status", status)))
    manifest = {"format": 1, "step": 50, "strategy": "fsdp2", "world_size": 4, "global_batch_size": 8}
    for step, is_committed in ((50, True), (100, False)):
        (folder / f"checkpoint-{step}").mkdir()
        if is_committed:
            files = {"model.safetensors": {"bytes": 3 * 2**30, "xxh3_128": "0" * 32}}
            (folder / f"checkpoint-{step}" / "hfscale_manifest.json").write_text(
                json.dumps(manifest | {"files": files})
            )
    return folder


class ParsedPage(HTMLParser):
    """The text, the tags and the addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.addresses = "", [], []
        self.feed(text)

    def handle_data(self, data):
        self.text += f"{data} "

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src", "srcset", "action", "xlink:href")]


def test_a_run_is_read_from_its_files(tmp_path):
    run = load_run(write_run(tmp_path))
    first, second = run.attempts
    assert (first.begun, first.kept_until, first.ended) == (BEGIN, BEGIN + 500, BEGIN + 540)
    assert (second.first_step, second.kept_until, second.ended) == (50, BEGIN + 1000, BEGIN + 1000)
    assert run.wall_s == 1000
    assert [(one.name, one.is_committed, one.bytes) for one in run.checkpoints] == [
        ("checkpoint-50", True, 3 * 2**30),
        ("checkpoint-100", False, None),
    ]
    assert run.split["compute"] == pytest.approx(540)  # 10% of the 600 s in steps is exposed communication
    assert sum(run.split.values()) == pytest.approx(1000)


def job_event():
    """The event of a full training of Llama 3.1 8B under FSDP2."""
    config = {key: value for key, value in catalogue()["llama-3.1-8b"].items() if key != "hub"}
    return {
        "event": "job",
        "step": 10,
        "time": BEGIN,
        "config": config,
        "layout": {"dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "pp": 1},
        "zero": 3,
        "micro_batch": 2,
        "method": "full",
        "lora_rank": 16,
        "optimizer": "adamw_torch_fused",
        "compile": False,
        "fused_loss": False,
        "offload": "none",
        "gpus_per_node": 4,
        "virtual_stages": 1,
        "schedule": "1F1B",
        "sequence_parallel": False,
        "trainer": "Trainer",
    }


def compared(folder, tokens_per_s, **changed):
    """The comparison of a run with its estimate; `changed` are keys of its metrics or of its job."""
    job = job_event() | {key: value for key, value in changed.items() if "/" not in key}
    workload = {"event": "workload", "step": 10, "time": BEGIN, **WORKLOAD, "device": "NVIDIA H100 80GB HBM3"}
    metrics = {"scaling/tokens_per_s": tokens_per_s, **{key: value for key, value in changed.items() if "/" in key}}
    records = [{"step": step, "time": BEGIN, **metrics} for step in (10, 20, 30)]
    folder.mkdir()
    return predict(load_run(write_run(folder, events=[workload, job], records=records)))


class TestPrediction:
    @pytest.fixture(autouse=True)
    def no_user_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))

    def test_the_estimate_of_the_run_is_the_planners(self, tmp_path):
        found = compared(tmp_path / "run", 20_000.0, **{"gpu/memory_peak_gib": 61.0})
        expected = hfscale.estimate(
            "llama-3.1-8b",
            gpu="H100-80GB",
            layout={"dp_shard": 4},
            seq_len=8192,
            micro_batch=2,
            global_batch=8,
            zero=3,
            gpus_per_node=4,
            compile=False,  # as the run was
        )
        assert found.predicted_tokens_per_s == pytest.approx(4 * expected.tokens_per_s_per_gpu)
        assert found.speed_error == pytest.approx(4 * expected.tokens_per_s_per_gpu / 20_000 - 1)
        assert found.predicted_memory_gib == pytest.approx(allocated_gib(expected.memory))

    @pytest.mark.parametrize(
        ("slower", "shares", "assumption"),
        [
            (1.0, {}, "within 10%"),
            (0.5, {}, "computation takes"),
            (0.5, {"scaling/data_wait_fraction": 0.5}, "waiting for data takes"),
            (0.5, {"scaling/comm_fraction": 0.5}, "exposed communication takes"),
        ],
    )
    def test_the_assumption_that_was_off_is_named(self, tmp_path, slower, shares, assumption):
        predicted = compared(tmp_path / "first", 1.0).predicted_tokens_per_s
        found = compared(tmp_path / "second", predicted * slower, **shares)
        assert assumption in found.assumptions[0]
        assert sum(found.measured_s.values()) == pytest.approx(8 * 8192 / (predicted * slower))

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"trainer": "GRPOTrainer"}, "GRPOTrainer"),
            ({"trainer": "RLOOTrainer", "of_trl": True}, "RLOOTrainer"),
            ({"optimizer": "lion"}, "optimizer"),
            ({"layout": {"dp_shard": "x"}}, "incomplete"),
            ({"config": []}, "incomplete"),
            ({"config": {"model_type": "unheard"}}, "unheard"),
            ({"micro_batch": 0}, "micro_batch"),
        ],
    )
    def test_why_there_is_no_comparison(self, tmp_path, changed, reason):
        assert reason in compared(tmp_path / "run", 1.0, **changed)

    def test_an_older_run_says_so(self, tmp_path, capsys):
        write_run(tmp_path)
        assert main(["report", str(tmp_path), "--json"]) == 0
        assert "earlier version" in json.loads(capsys.readouterr().out)["prediction"]["absent"]


def test_the_times_of_an_unfinished_run_come_from_its_newest_checkpoint(tmp_path):
    events = [{"event": "launch", "step": 0, "time": BEGIN}, {"event": "save", "step": 50, "time": BEGIN + 500}]
    write_run(tmp_path, events=events, status={"status": "running", "step": 100, "checkpoint": "checkpoint-50"})
    goodput_tracker = {"as_of": BEGIN + 490, "first_launch": BEGIN, "seconds": {"compute": 400.0, "start_up": 90.0}}
    state = {"global_step": 50, "stateful_callbacks": {"hfscale": {"goodput": goodput_tracker}}}
    (tmp_path / "checkpoint-50" / "trainer_state.json").write_text(json.dumps(state))
    run = load_run(tmp_path)
    assert run.status == "running"
    assert run.split == pytest.approx(
        {"compute": 360, "exposed communication": 40, "start_up": 90, "since the last checkpoint": 510}
    )
    assert "since the last checkpoint" in ParsedPage(page(run)).text


def test_the_largest_bottleneck_is_first(tmp_path):
    found = bottlenecks(load_run(write_run(tmp_path)))
    assert [one.check for one in found] == ["data wait", "restarts"]
    assert found[0].share == pytest.approx(0.25)
    # Young: sqrt(2 x 8 s x 890 s up / 1 restart)
    assert "every 1 min 59 s" in found[1].fix


def test_a_completed_run_that_is_trained_again_from_an_earlier_checkpoint_is_not_told_to_restart_better(tmp_path):
    split = SPLIT | {"down": 0.0, "lost": 150.0}
    again = {"event": "launch", "step": 50, "time": BEGIN + 650, "world_size": 4, "previous_alive": BEGIN + 540}
    events = [
        {"event": "launch", "step": 0, "time": BEGIN, "world_size": 4},
        {"event": "end", "step": 70, "time": BEGIN + 540, "seconds": split, "status": "completed"},
        again,
        {"event": "end", "step": 100, "time": BEGIN + 1000, "seconds": split, "status": "completed"},
    ]
    run = load_run(write_run(tmp_path, events=events))
    repeated = next(one for one in bottlenecks(run) if "work" in one.check)
    assert "keep the last checkpoint" in repeated.fix
    assert "hfscale run" not in repeated.fix


def test_launches_whose_files_are_lost_count_as_restarts(tmp_path, capsys):
    """Two launches on a disk that was lost, which `hfscale run` has counted, and two of which the files remain."""
    events = [
        {"event": "launch", "step": 40, "time": BEGIN, "world_size": 4, "lost_launches": 2},
        {"event": "launch", "step": 50, "time": BEGIN + 650, "world_size": 4, "previous_alive": BEGIN + 540},
        {"event": "end", "step": 100, "time": BEGIN + 1000, "seconds": SPLIT},
    ]
    run = load_run(write_run(tmp_path, events=events))
    text = ParsedPage(page(run)).text
    assert "3 restarts" in text
    assert "4. from step 50" in text
    assert "3 restarts" in bottlenecks(run)[1].problem
    assert next(tile for tile in headline(run) if tile.name == "Time").note == "4 launches"
    assert main(["report", str(tmp_path)]) == 0
    assert "4.  from step 50" in capsys.readouterr().out


def test_the_page_is_complete_and_loads_nothing(tmp_path):
    text = page(load_run(write_run(tmp_path)))
    parsed = ParsedPage(text)
    for expected in (
        "completed",
        "llama, 8.03B parameters",
        "fsdp2 on 4 processes",
        "6.55M",
        "$2.75",
        "60%",
        "41%",
        "40k",
        "16 min",
        "What to change first",
        "data wait",
        "Where the time went",
        "down between launches",
        "Timeline",
        "2. from step 50",
        "Loss",
        "Tokens per second",
        "Waiting for data, by rank",
        "Peak memory of the fullest GPU",
        "Checkpoints",
        "3 GiB",
        "incomplete",
    ):
        assert expected in parsed.text, expected
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(parsed.tags)
    assert parsed.addresses == []
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)


def test_unknown_numbers_of_a_run_that_has_just_begun_are_marked(tmp_path):
    (tmp_path / "scaling.jsonl").write_text('{"step": 1, "time": 5, "loss": 3.0}\n')
    html = page(load_run(tmp_path))
    text = ParsedPage(html).text
    assert html.count("class=unknown") == 6
    assert "give usd_per_gpu_hour" in text
    assert "inf" not in text.split()
    assert "nan" not in text.lower().split()


HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\'"&'


def test_text_from_files_is_escaped_and_secrets_are_redacted(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "planted-environment-secret")
    folder = tmp_path / "run<b>&'\"name"
    folder.mkdir()
    secret = f"{HOSTILE} hf_{'a' * 30} planted-environment-secret --hub_token=abcdefgh"
    events = [
        {"event": "launch", "step": 0, "time": BEGIN, "world_size": "<i>4</i>", "strategy": HOSTILE},
        {
            "event": "workload",
            "step": 1,
            "time": BEGIN,
            **WORKLOAD,
            "device": secret,
            "model_type": HOSTILE,
            "baseline": secret,
            "world_size": 2,
        },
        {"event": "finding", "step": 1, "time": BEGIN, "cause": HOSTILE, "numbers": HOSTILE, "mend": HOSTILE},
        {"event": "end", "step": 9, "time": BEGIN + 9, "seconds": {"compute": 9, HOSTILE: 9}, "advice": secret},
    ]
    records = [
        {
            "step": step,
            "time": BEGIN + step,
            "loss": 1,
            "scaling/tokens_per_s": 10,
            "scaling/tokens_per_s_per_gpu": 5,
            "scaling/efficiency": 0.5,
            HOSTILE: 3,
        }
        for step in range(1, 5)
    ]
    write_run(folder, events=events, records=records, status={"status": HOSTILE, "reason": secret})
    run = load_run(folder)
    text = page(run)
    assert not {"script", "img"} & set(ParsedPage(text).tags)
    for markup in ('alert("x")', "<i>4", "run<b>"):
        assert markup not in text
    for planted in (f"hf_{'a' * 30}", "planted-environment-secret", "abcdefgh"):
        assert planted not in text
    assert run.status == "unknown"


def test_what_a_manifest_says_does_not_become_a_part_of_the_page(tmp_path):
    write_run(tmp_path, events=[], records=[{"step": 1, "time": BEGIN, "loss": 1}])
    before = page(load_run(tmp_path)).count("<span class=bad>incomplete")
    for step, field in enumerate(("world_size", "step", "strategy"), start=1):
        fields = {"format": 1, "step": step, "strategy": "ddp", "world_size": 1, "global_batch_size": 1, "files": {}}
        (tmp_path / f"checkpoint-{step}").mkdir()
        manifest = tmp_path / f"checkpoint-{step}" / "hfscale_manifest.json"
        manifest.write_text(json.dumps(fields | {field: '<meta http-equiv="refresh" content="0;url=//x">'}))
    text = page(load_run(tmp_path))
    assert "refresh" not in text
    assert text.count("<span class=bad>incomplete") == before + 3


@pytest.mark.parametrize(
    "lines",
    [
        '{"step": 1, "time": 1e400, "loss": 1e999}',
        '{"step": "x", "loss": 2}',
        '{"step": 1, "loss": null}',
        '{"step": 1, "time": [1], "scaling/tokens_seen": {"a": 1}}',
        '{"step": true}',
        '{"step": 1e300, "loss": -1e300}',
    ],
)
def test_malformed_lines_still_give_a_page(tmp_path, lines):
    (tmp_path / "scaling.jsonl").write_text(lines + "\n")
    (tmp_path / "hfscale_timeline.jsonl").write_text(
        '{"event": "launch", "step": 0}\n{"event": "save", "step": null, "time": "x"}\n{"event": 3, "step": 1}\n'
        '{"event": "launch", "step": "y", "time": -1, "previous_alive": "z"}\n'
    )
    (tmp_path / "hfscale_ranks.jsonl").write_text('{"step": 1, "a": [1, "x"], "data_wait_fraction": [0, 0]}\n')
    assert "</html>" in page(load_run(tmp_path))


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    with pytest.raises(UsageError, match=r"scaling\.jsonl"):
        load_run(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "not a directory" in capsys.readouterr().err


def test_the_mfu_of_an_fp8_run_is_said_to_be_of_the_bf16_peak(tmp_path):
    """So it is neither compared with the peak of fp8 nor mistaken for that of a run in bf16."""
    facts = WORKLOAD | {"precision": "fp8", "flops_source": "formula", "peak_dtype": "bf16"}
    run = load_run(write_run(tmp_path, events=[{"event": "workload", "step": 10, "time": BEGIN, **facts}]))
    mfu = next(tile for tile in headline(run) if tile.name == "MFU")
    assert (mfu.value, mfu.note) == ("41%", "of the dense bf16 peak")
    assert "NVIDIA H100 · fp8" in subtitle(run)


def test_text_and_json(tmp_path, capsys):
    folder = write_run(tmp_path)
    assert main(["report", str(folder), "--html", str(tmp_path / "sub" / "r.html")]) == 0
    out = capsys.readouterr().out
    for expected in (
        "What to change first",
        "1. data wait, 25% of",
        "from step 50",
        "checkpoint-50",
        "Written",
    ):
        assert expected in out
    assert main(["report", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["headline"]["Goodput"] == "60%"
    assert answer["metrics"]["scaling/tokens_seen"] == 6553600
    assert [one["title"] for one in answer["priorities"]] == ["data wait", "restarts"]


@needs_browser
def test_a_browser_renders_it_on_a_wide_screen_and_on_a_phone(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    assert main(["report", str(write_run(folder)), "--html", str(tmp_path / "r.html")]) == 0
    base = browser_command(tmp_path / "profile", "--force-device-scale-factor=1")
    address = (tmp_path / "r.html").as_uri()
    sizes = []
    for name, window in (("wide", "1100,1400"), ("phone", "500,1400")):
        shot = tmp_path / f"{name}.png"
        done = subprocess.run(
            [*base, f"--window-size={window}", f"--screenshot={shot}", address],
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert shot.is_file(), done.stderr[-500:]
        assert shot.read_bytes().startswith(b"\x89PNG")
        sizes.append(shot.stat().st_size)
    assert min(sizes) > 20_000  # an empty page is about 5 kB
    dom = subprocess.run(
        [*base, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "What to change first" in ParsedPage(dom).text


def test_ticks_are_round_and_inside():
    for low, high in ((0, 1), (2.1, 10.4), (0.00013, 0.00029), (-5, 1e6), (61.0, 61.3)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 6
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert ticks(3, 3) == [3]


def test_long_series_are_thinned_and_a_single_point_is_drawn():
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    assert len(thin(points)) == 300
    assert (
        line_chart([Series(name="a", points=[(1, 2)], colour="blue")], label="L", x_name="x").count('class="line"')
        == 1
    )
    assert line_chart([Series(name="a", points=[], colour="blue")], label="L", x_name="x") == ""


def test_a_chart_shows_what_was_planned_and_the_newest_value():
    line = Series(name="<MFU>", points=[(1, 40), (2, 30)], colour="blue", plan=50.0, newest=29.5)
    drawn = line_chart([line], label="L", x_name="step", from_zero=True, form="{}%")
    (height,) = re.findall(r'class="plan" d="M0 ([\d.]+)H1000"><title>&lt;MFU&gt;, plan: 50%</title>', drawn)
    assert float(height) == pytest.approx(1000 * 0.06 / 1.06, abs=0.1)
    assert "<small>29.5%, plan 50%</small>" in drawn
    other = Series(name="goodput", points=[(1, 70)], colour="gray")
    both = line_chart([line, other], label="L", x_name="step", form="{}%")
    assert "<b>29.5%, plan 50%</b>" in both
    assert "goodput <b>70%</b>" in both


def test_a_heat_map_of_many_ranks_shows_the_largest_number_of_each_row():
    samples = [(float(step), [0.0] * 999 + [1.0]) for step in range(200)]
    drawn = heat_map(samples, label="L", form="{:.0%}")
    assert drawn.count("<rect") == 64 * 80
    assert drawn.count("fill-opacity:1.000") == 80


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count(1234567), "1.23M"),
        (count(7), "7"),
        (percent(0.0312), "3.1%"),
        (percent(0.31), "31%"),
        (duration(0.5), "0.5 s"),
        (duration(59.6), "60 s"),
        (duration(3600), "1 h"),
        (duration(4 * 3600 + 59.6 * 60), "5 h"),
        (duration(90061), "1 d 1 h"),
        (usd(1234.5), "$1,234"),
        (usd(0.0123), "$0.012"),
        (size(3 * 2**30), "3 GiB"),
    ],
)
def test_numbers_are_formatted(text, expected):
    assert text == expected


def test_recoveries_are_listed_with_their_reason_and_the_parts_of_their_time(tmp_path, capsys):
    write_run(tmp_path)
    assert "Recoveries" not in page(load_run(tmp_path))
    parts = {"ending_s": 1.0, "waiting_s": 0.0, "starting_s": 8.0, "loading_s": 3.0, "first_step_s": 0.5}
    event = {"event": "recovery", "time": BEGIN + 800, "step": 51, "steps_lost": 2, "rank": 3, **parts}
    with (tmp_path / "hfscale_timeline.jsonl").open("a") as file:
        file.write(json.dumps(event | {"reason": "<b>CUDA error</b>"}) + "\n")
    text = page(load_run(tmp_path))
    assert "rank 3: &lt;b&gt;CUDA error&lt;/b&gt;" in text
    assert "<td>51</td>" in text
    assert "<td>2</td><td>12 s</td><td>ending 1 s, waiting 0 s, starting 8 s" in text
    assert main(["report", str(tmp_path)]) == 0
    assert "step 51  rank 3: <b>CUDA error</b>  steps repeated: 2  12 s" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert [one["steps_lost"] for one in json.loads(capsys.readouterr().out)["recoveries"]] == [2]


def test_islands_have_a_section_with_their_rounds_and_the_bytes_sent(tmp_path):
    write_run(tmp_path)
    assert "Islands" not in page(load_run(tmp_path))
    with (tmp_path / "scaling.jsonl").open("a") as file:
        for step, drift in ((1000, 0.02), (1100, 0.01)):
            keys = {"round_s": 3.0, "bytes": 2**20, "stall_fraction": 0.25, "drift": drift, "dropped_samples": 64}
            file.write(json.dumps({"step": step} | {f"islands/{name}": value for name, value in keys.items()}) + "\n")
    text = page(load_run(tmp_path))
    assert "<h2>Islands</h2>" in text
    assert "2 logs with a round; training waits 3 s" in text
    assert "sent 2 MiB" in text
    assert "64 samples were dropped" in text
    assert "Share of the time in rounds" in text
