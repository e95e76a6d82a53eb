"""`hfscale plan --islands`: the arithmetic of a round, and when islands are said to pay."""

import json
import re
from dataclasses import replace

import pytest
from conftest import REPOSITORY

from hfscale.cli import main
from hfscale.core.flags import parse_bandwidth
from hfscale.errors import UsageError
from hfscale.facts.compression import Compression
from hfscale.planner.islands import Islands, judge_islands
from hfscale.planner.memory import trained_parameters
from hfscale.planner.plan import plan

PLAN = ["plan", "llama-3.2-1b", "--gpu", "H100-80GB", "--gpus", "8", "--top", "1"]


@pytest.fixture(scope="module")
def estimate():
    return plan("llama-3.2-1b", gpu="H100-80GB", gpus=8, top=1).choices[0].estimate


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1Gbps", 125e6), ("100 Mbit/s", 12.5e6), ("2.5gbit", 312.5e6), ("10kbps", 1250.0)],
)
def test_a_bandwidth_is_in_bits(text, expected):
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["1GB/s", "1GBps", "1", "0Gbps", "-1Gbps", "fast", "1e3Gbps"])
def test_a_bandwidth_without_the_unit_or_the_sign_is_refused(text):
    with pytest.raises(UsageError, match=text):
        parse_bandwidth(text)


def test_a_round_and_its_share_by_hand(estimate):
    found = judge_islands(estimate, Islands(count=2, link_bytes_s=125e6), tokens=1e9)
    trained = int(trained_parameters(estimate.job))
    assert found.bytes_per_round == 4 * trained
    assert found.round_s == pytest.approx(2 * 4 * trained / 125e6)  # up, then down
    period = 100 * estimate.time.total + found.round_s
    assert found.stall_fraction == pytest.approx(found.round_s / period)
    assert found.diloco == pytest.approx(2 * 100 * estimate.job.tokens_per_step / period)
    assert found.hours == pytest.approx(1e9 / found.diloco / 3600)
    assert found.one_island == pytest.approx(estimate.job.tokens_per_step / estimate.time.total)


def test_fewer_bits_send_fewer_bytes_and_wait_less(estimate):
    full = judge_islands(estimate, Islands(count=2, link_bytes_s=125e6))
    small = judge_islands(estimate, Islands(count=2, link_bytes_s=125e6, compression=Compression(bits=4)))
    assert small.bytes_per_round == pytest.approx(full.bytes_per_round / 8, rel=0.04)
    assert small.stall_fraction < full.stall_fraction
    assert full.ddp_bytes_per_token / full.bytes_per_token == pytest.approx(100, rel=0.01)


def test_fragments_and_overlap_by_hand(estimate):
    """The last fragment also has the embeddings; overlapped steps hide a part of each round."""
    step_s, shape = estimate.time.total, estimate.job.shape
    layers = 4 * shape.layers_parameters // 4  # bytes of a quarter of the layers
    last = 4 * (shape.total_parameters - 3 * shape.layers_parameters // 4)
    link = last / step_s  # the last fragment takes two steps, one up and one down
    islands = Islands(count=2, link_bytes_s=link, steps=100, fragments=4)
    found = judge_islands(estimate, islands)
    assert found.bytes_per_round == pytest.approx(last, rel=1e-6)
    assert found.round_s == pytest.approx(2 * step_s)
    waits = 2 * step_s * (1 + 3 * layers / last)
    assert found.stall_fraction == pytest.approx(waits / (100 * step_s + waits))
    partly = judge_islands(estimate, replace(islands, overlap_steps=1))
    waits = step_s + 3 * max(0.0, 2 * layers / last - 1) * step_s
    assert partly.stall_fraction == pytest.approx(waits / (100 * step_s + waits))
    assert partly.bytes_per_token == pytest.approx(
        judge_islands(estimate, replace(islands, fragments=1)).bytes_per_token
    )
    hidden = judge_islands(estimate, replace(islands, overlap_steps=2))
    assert hidden.stall_fraction == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(UsageError, match="island_fragments is 17"):
        judge_islands(estimate, replace(islands, fragments=17))


def test_islands_pay_over_a_slow_link_and_not_over_a_fast_one(estimate):
    slow = judge_islands(estimate, Islands(count=2, link_bytes_s=125e6))
    assert slow.pays
    assert slow.diloco > max(slow.ddp, slow.fsdp2, slow.one_island)
    fast = judge_islands(estimate, Islands(count=2, link_bytes_s=1e12, steps=1))
    assert not fast.pays
    assert "as fast" in fast.reason


def test_where_one_island_is_as_fast_the_number_of_steps_that_suffices_is_named(estimate):
    islands = Islands(count=2, link_bytes_s=1e5, steps=10)
    found = judge_islands(estimate, islands)
    assert not found.pays
    assert "one island alone" in found.reason
    steps = int(found.reason.rsplit("--island-steps ", 1)[1].split()[0])
    assert judge_islands(estimate, replace(islands, steps=steps)).stall_fraction <= 0.05
    assert judge_islands(estimate, replace(islands, steps=steps - 1)).stall_fraction > 0.05


def test_the_command_prints_a_table_and_json(capsys):
    islands = ["--islands", "2", "--island-bandwidth", "1Gbps", "--island-bits", "4"]
    assert main([*PLAN, *islands, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["islands"]
    assert found["pays"] is True
    assert 0 < found["stall_fraction"] < 1
    assert main([*PLAN, *islands[:4], "--island-bits", "2", "--island-density", "0.0156", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["islands"]["bytes_per_round"] < found["bytes_per_round"] / 15
    assert main([*PLAN, *islands, "--island-fragments", "4", "--island-overlap-steps", "5"]) == 0
    printed = capsys.readouterr().out
    assert "DiLoCo" in printed
    assert "4 fragments" in printed
    assert "FSDP2 over the link" in printed
    assert main([*PLAN, "--json"]) == 0
    assert "islands" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--islands", "1", "--island-bandwidth", "1Gbps"], "--islands is 1"),
        (["--islands", "2"], "--island-bandwidth"),
        (["--island-bandwidth", "1Gbps"], "--islands"),
        (["--islands", "2", "--island-bandwidth", "1GB/s"], "1GB/s"),
        (["--islands", "2", "--island-bandwidth", "1Gbps", "--island-bits", "5"], "--island-bits is 5"),
        (["--islands", "2", "--island-bandwidth", "1Gbps", "--island-density", "2"], "--island-density is 2"),
        (["--islands", "2", "--island-bandwidth", "1Gbps", "--island-steps", "0"], "--island-steps is 0"),
        (["--islands", "2", "--island-bandwidth", "1Gbps", "--island-fragments", "0"], "--island-fragments is 0"),
        (["--islands", "2", "--island-bandwidth", "1Gbps", "--island-fragments", "17"], "--island-fragments is 17"),
        (["--islands", "2", "--island-bandwidth", "1Gbps", "--island-overlap-steps", "100"], "overlap-steps is 100"),
    ],
)
def test_wrong_options_are_one_line(capsys, flags, named):
    assert main([*PLAN, *flags]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert len(error.strip().splitlines()) == 1


def test_the_page_has_the_computed_table(capsys):
    page = (REPOSITORY / "docs" / "islands.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^hfscale (plan .* --islands .*)$", page, re.MULTILINE)
    found = {}
    for bits in ("32", "4"):
        assert main([*command.replace("--island-bits 4", f"--island-bits {bits}").split(), "--json"]) == 0
        found[bits] = json.loads(capsys.readouterr().out)["islands"]
    for bits, one in found.items():
        row = f"| {one['diloco']:,.0f} | {one['bytes_per_token']:.1f} | {one['stall_fraction']:.1%} |"
        assert f"| DiLoCo, H = 100, {bits} bits {row}" in page
    one = found["32"]
    assert f"| one island alone | {one['one_island']:,.0f} |" in page
    assert f"| DDP or HSDP over the link | {one['ddp']:,.0f} | {one['ddp_bytes_per_token']:,.0f} |" in page
    assert f"| FSDP2 over the link | {one['fsdp2']:,.0f} |" in page
