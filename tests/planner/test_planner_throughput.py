"""The time model: collectives and bubbles by hand, what must be slower is slower, published runs within a
tolerance."""

import json
import math
import statistics
from dataclasses import replace

import pytest
from conftest import REPOSITORY
from planner_jobs import job

from benchmarks import planner_choice, planner_fit, planner_memory, planner_runs
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.models import find_model
from hfscale.facts.schedules import one_f_one_b
from hfscale.planner.estimate import estimate_job
from hfscale.planner.frameworks import find_framework, framework_names, shared_constants
from hfscale.planner.job import OPTIMIZERS
from hfscale.planner.kernels import Rates, layer_forward
from hfscale.planner.network import Group, Network
from hfscale.planner.throughput import MUON_ITERATIONS, _Copies, exposed_s, step_time

PERFECT = replace(shared_constants(), link_rate=1.0, network_rate=1.0, hop_s=0.0, network_hop_s=0.0)


def network(constants=PERFECT, **options):
    options = {"node_size": 8, "network_gb_s": 50.0, **options}
    return Network.of(accelerator("H100-80GB"), shared=constants, **options)


class TestNetwork:
    @pytest.mark.parametrize(
        ("gpu", "card"),
        [("T4", 12.5 / 8), ("RTX4090", 12.5 / 8), ("L40S", 12.5 / 8), ("H200-NVL", 25.0), ("MI300X", 50.0)],
    )
    def test_cards_without_a_reference_node_share_one_network_card(self, gpu, card):
        links = Network.of(accelerator(gpu), node_size=8, network_gb_s=None, shared=PERFECT)
        assert links.card_bytes_s == pytest.approx(card * 1e9)

    def test_a_ring_moves_all_but_a_ranks_own_part(self):
        assert network().gather_s(8e9, Group(size=8)) == pytest.approx(8e9 * 7 / 8 / 450e9)
        assert network().reduce_s(8e9, Group(size=8)) == pytest.approx(2 * 8e9 * 7 / 8 / 450e9)

    def test_full_nodes_use_all_network_cards_and_strided_groups_one(self):
        assert network().bandwidth(Group(size=16)) == pytest.approx(8 * 50e9)
        assert network().bandwidth(Group(size=2, stride=8)) == pytest.approx(50e9)
        assert network().bandwidth(Group(size=4, stride=4)) == pytest.approx(2 * 50e9)

    def test_a_network_faster_than_nvlink_does_not_help(self):
        assert network(network_gb_s=200.0).bandwidth(Group(size=16)) == pytest.approx(450e9)

    def test_latency_counts_hops_in_and_between_nodes(self):
        slow = replace(PERFECT, hop_s=1e-6, network_hop_s=1e-5)
        assert network(slow).latency(Group(size=16)) == pytest.approx(15e-6 + 1e-5)
        assert network(slow).latency(Group(size=4, stride=8)) == pytest.approx(3e-6 + 3e-5)

    def test_without_nvlink_ranks_communicate_over_pcie(self):
        slow = Network.of(accelerator("RTX4090"), node_size=8, network_gb_s=None, shared=PERFECT)
        assert slow.bandwidth(Group(size=2)) == pytest.approx(0.31 * 32e9)

    def test_one_rank_sends_nothing(self):
        assert network(shared_constants()).gather_s(1e9, Group(size=1)) == 0.0
        assert network(shared_constants()).exchange_s(1e9, Group(size=1)) == 0.0

    def test_a_bandwidth_must_be_positive_and_finite(self):
        with pytest.raises(UsageError, match=r"network_gb_s is -1\.0"):
            network(network_gb_s=-1.0)
        with pytest.raises(UsageError, match="network_gb_s is inf"):
            network(network_gb_s=math.inf)


def test_computation_hides_communication_up_to_the_overlap():
    assert exposed_s(1.0, 10.0, 0.8) == pytest.approx(0.2)
    assert exposed_s(10.0, 1.0, 0.8) == pytest.approx(9.2)
    assert exposed_s(0.0, 1.0, 0.8) == 0.0


class TestStep:
    def test_the_parts_add_up_and_give_the_rate(self):
        found = estimate_job(job())
        time = found.time
        assert time.total == pytest.approx(time.compute + time.communication + time.bubble + time.optimizer)
        assert found.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / time.total / 8)

    def test_mfu_is_model_flops_over_the_peak(self):
        found = estimate_job(job())
        flops = found.job.shape.flops_per_token(4096)
        assert found.mfu == pytest.approx(found.tokens_per_s_per_gpu * flops / 989e12)

    def test_the_mfu_of_fp8_is_relative_to_the_bf16_peak_as_that_of_a_run(self):
        found, eight_bits = estimate_job(job()), estimate_job(job(precision="fp8"))
        speedup = eight_bits.tokens_per_s_per_gpu / found.tokens_per_s_per_gpu
        assert eight_bits.mfu / found.mfu == pytest.approx(speedup)
        assert found.time.compute / eight_bits.time.compute > 1.2
        assert speedup > 1.1  # the copies of FSDP2 cost as much as with BF16

    def test_zero2_reduces_the_gradients_of_every_micro_batch_and_ddp_once(self):
        replicas = ParallelLayout(dp_replicate=8)
        waited = {}
        for zero in (0, 2):
            jobs = [job(layout=replicas, zero=zero, global_batch=8 * count) for count in (1, 2, 3)]
            waited[zero] = [estimate_job(one).time.communication for one in jobs]
        first, second, third = waited[2]
        assert second - first == pytest.approx(third - second)
        assert second > first > 0
        assert first > second - first  # the parameters are gathered once
        assert waited[0][0] == pytest.approx(waited[0][2])

    def test_without_a_known_peak_there_is_no_mfu(self):
        nameless = replace(accelerator("H100-80GB"), tf32_tflops=None)
        assert estimate_job(job(gpu=nameless, precision="fp32")).mfu is None

    @pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (4, 64), (8, 16)])
    def test_the_bubble_is_that_of_1f1b(self, stages, micro_batches):
        """(p-1)/m of the ideal time with equal stages (Narayanan et al.); a head on the last stage makes them unequal,
        so it is made small here."""
        shape = replace(job().shape, vocab=8)
        run = job(shape=shape, pp=stages, zero=1, stack="megatron", global_batch=micro_batches)
        time = estimate_job(run).time
        assert time.bubble / (time.compute + time.communication) == pytest.approx(
            (stages - 1) / micro_batches, rel=0.08
        )

    @pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 8), (8, 5)])
    def test_a_simulated_1f1b_has_the_same_duration_and_micro_batches_in_flight(self, stages, micro_batches):
        slots = one_f_one_b(stages, micro_batches)
        assert max(slot.end for slot in slots) == (micro_batches + stages - 1) * 3
        assert len(slots) == 2 * stages * micro_batches
        held = most = 0
        for slot in sorted((slot for slot in slots if slot.rank == 0), key=lambda slot: slot.start):
            held += 1 if slot.is_forward else -1
            most = max(most, held)
        assert most == min(stages, micro_batches)

    def test_virtual_stages_divide_the_bubble(self):
        plain = estimate_job(job(pp=4, zero=1, global_batch=8)).time.bubble
        looped = estimate_job(job(pp=4, zero=1, global_batch=8, virtual_stages=4)).time.bubble
        assert looped == pytest.approx(plain / 4, rel=0.05)

    def test_full_recomputation_costs_about_a_third(self):
        """One more forward pass: 8/6 of the layers' FLOPs (Korthikanti et al.), without the head."""
        none, full = (estimate_job(job(activation_checkpointing=kind)).time.compute for kind in ("none", "full"))
        assert 1.25 < full / none < 1.34

    @pytest.mark.parametrize(
        ("slower", "faster"),
        [
            ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}),
            ({"activation_checkpointing": "selective"}, {"activation_checkpointing": "none"}),
            ({"compile": False}, {"compile": True}),
            ({"precision": "bf16"}, {"precision": "fp8"}),
            ({"precision": "fp32"}, {"precision": "bf16"}),
            ({"method": "full"}, {"method": "lora"}),
            ({"flash_attention": False}, {"flash_attention": True}),
            ({"gpu": accelerator("A100-80GB")}, {"gpu": accelerator("H100-80GB")}),
            ({"gpu": accelerator("H100-96GB")}, {"gpu": accelerator("H100-80GB")}),
            ({"dp_shard": 64, "network_gb_s": 3.0}, {"dp_shard": 64, "network_gb_s": 50.0}),
            ({"dp_replicate": 8, "zero": 0, "offload": "optimizer"}, {"dp_replicate": 8, "zero": 0}),
            ({"tp": 8, "zero": 0, "gpus_per_node": 1}, {"tp": 8, "zero": 0}),
            ({"pp": 4, "zero": 0, "global_batch": 8}, {"pp": 4, "zero": 0, "global_batch": 64}),
            ({"seq_len": 16384, "global_batch": 16}, {"seq_len": 4096, "global_batch": 64}),
        ],
    )
    def test_time_grows_with(self, slower, faster):
        assert estimate_job(job(**slower)).tokens_per_s_per_gpu < estimate_job(job(**faster)).tokens_per_s_per_gpu

    def test_small_micro_batches_are_limited_by_kernel_launches(self):
        tiny = estimate_job(job(seq_len=64, zero=0, dp_replicate=1, global_batch=1))
        assert tiny.time.compute >= 32 * 2.5 * find_framework("hf").launch_s * 0.99

    def test_heads_off_the_tensor_cores_are_slow_without_flash_attention(self):
        """BLOOM's prototypes with 128 heads of width 108 had three quarters of the speed of those with 96 heads of
        144."""
        shape = job().shape
        odd = replace(shape, attention=replace(shape.attention, head_dim=124, value_head_dim=124))
        rates = [
            estimate_job(job(shape=kind, flash_attention=flash, gpu=accelerator("A100-80GB"))).tokens_per_s_per_gpu
            for flash in (False, True)
            for kind in (shape, odd)
        ]
        assert rates[1] < 0.8 * rates[0]
        assert rates[3] > 0.98 * rates[2]

    def test_families_without_sdpa_write_their_scores_to_memory(self):
        """Gemma 2 supports neither SDPA nor flash attention by default: 24 bytes per score, and 12 to cap it."""
        shape = replace(find_model("gemma-2-2b"), windows=(None,) * 26)
        asked = {"seq_len": 8192, "zero": 0, "dp_replicate": 8}
        eager, sdpa = (job(shape=replace(shape, model_type=name), **asked) for name in ("gemma2", "gemma3_text"))
        assert (eager.writes_scores, sdpa.writes_scores) == (True, False)
        framework, shared = find_framework("hf"), shared_constants()
        times = [layer_forward(run, framework, shared, Rates(run, framework, shared)) for run in (eager, sdpa)]
        scores = 36 * 8 * 8192**2 / (3.35e12 * shared.memory_rate)
        assert times[0].attention > scores
        assert times[0].attention > 2 * times[1].attention
        assert times[0].matmul == times[1].matmul
        other_stack = replace(eager, stack="titan")
        assert not other_stack.writes_scores

    def test_megatron_deepspeed_reduces_gradients_without_overlap(self):
        old = {"stack": "megatron", "flash_attention": False, "activation_checkpointing": "full", "network_gb_s": 3.0}
        own, shared_states = (job(zero=zero, dp_replicate=64, global_batch=64, **old) for zero in (0, 1))
        assert (own.is_megatron_deepspeed, shared_states.is_megatron_deepspeed) == (False, True)
        before, after = (estimate_job(run).time for run in (own, shared_states))
        assert after.compute - before.compute == pytest.approx(32 * 4 * find_framework("megatron").pass_s)
        # Updated parameters are gathered besides, in 2 bytes; gradients are reduced in 4
        assert after.communication > 1.2 * before.communication
        with_flash = estimate_job(replace(shared_states, flash_attention=True))
        assert with_flash.time.communication < 0.75 * after.communication

    def test_misaligned_widths_are_slow(self):
        """BLOOM's prototypes of hidden size 14400 on 8 ranks had 0.7 of the speed of those of 14336."""
        even, odd = (replace(job().shape, mlp=replace_ffn(job().shape, ffn)) for ffn in (14336, 14344))
        assert estimate_job(job(shape=odd)).time.compute > 1.1 * estimate_job(job(shape=even)).time.compute


def replace_ffn(shape, ffn):
    linears = tuple(
        replace(linear, inputs=ffn) if linear.inputs == 14336 else replace(linear, outputs=ffn)
        for linear in shape.mlp.linears
    )
    return replace(shape.mlp, ffn=ffn, linears=linears)


class TestChecks:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tp": 3}, "tp is 3, which does not divide 32 attention heads: use 2"),
            ({"pp": 64}, "pp 64 x virtual_stages 1"),
            ({"pp": 1, "virtual_stages": 2}, "virtual_stages is 2, which needs a pipeline"),
            ({"global_batch": 63}, "ranks x micro_batch 1: use 64"),
            ({"micro_batch": 0}, "micro_batch is 0"),
            ({"seq_len": -1}, "seq_len is -1"),
            ({"cp": 3, "seq_len": 4096}, "cp is 3"),
            ({"zero": 4}, "zero is 4"),
            ({"expert_parallel": 2}, "expert_parallel is 2, which does not divide 0 experts"),
        ],
    )
    def test_sizes_that_do_not_fit_are_one_line(self, changes, message):
        with pytest.raises(LayoutError) as caught:
            job(**changes).check()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(("gpu", "precision"), [("T4", "bf16"), ("A100-80GB", "fp8")])
    def test_a_precision_must_be_supported(self, gpu, precision):
        with pytest.raises(UsageError, match=f"precision is {precision}, .*{gpu}.*: use precision"):
            job(gpu=accelerator(gpu), precision=precision).check()

    def test_options_must_be_known(self):
        with pytest.raises(UsageError, match="activation_checkpointing is 'some': use one of none, selective, full"):
            job(activation_checkpointing="some").check()
        with pytest.raises(UsageError, match="did you mean titan"):
            find_framework("tittan")


@pytest.fixture(scope="module")
def runs():
    return [run for run in planner_runs.load()[0] if run.tokens_per_s_per_gpu and not run.is_doubted]


def on_too_little_memory(run, constants):
    """The run on a device with less memory than its predicted peak."""
    memory_gib = run.job.gpu.memory_gib * (1 + planner_memory.error(run, constants)) / 1.05
    return replace(run, job=replace(run.job, gpu=replace(run.job.gpu, memory_gib=memory_gib)))


class TestPublishedRuns:
    """The constants of frameworks.toml, compared with the runs of benchmarks/data."""

    def test_the_constants_are_physical(self):
        constants = [shared_constants(), *(find_framework(name) for name in framework_names())]
        for found in constants:
            for name, value in vars(found).items():
                if name in planner_fit.FRACTIONS:
                    assert 0 <= value < 1, name
                assert not isinstance(value, float) or math.isfinite(value)

    def test_half_of_the_rows_are_within_8_percent(self, runs):
        errors = planner_fit.residuals(runs, planner_fit.current())
        assert statistics.median(abs(math.expm1(error)) for error in errors) < 0.08

    def test_predictions_rank_the_runs_correctly(self, runs):
        figures = planner_fit.figures(runs, planner_fit.residuals(runs, planner_fit.current()))
        assert figures["rank_correlation"] > 0.99

    def test_runs_without_a_published_peak_are_upper_bounds(self):
        """Those that are predicted not to fit lower the fitted memory; those that fit change hardly anything."""
        all_runs, constants = planner_runs.load()[0], planner_fit.current()
        peaks = planner_memory.stated(all_runs)
        ran = planner_memory.only_ran(all_runs)
        alone = planner_memory.fit_peaks(peaks, constants)["shared"]
        assert all(planner_memory.error(run, constants) <= 0 for run in ran)
        with_fitting = planner_memory.fit_peaks([*peaks, *ran], constants)["shared"]
        assert with_fitting.fragmentation == pytest.approx(
            alone.fragmentation, abs=0.005
        )  # sources share their weight
        too_large = [on_too_little_memory(run, constants) for run in ran]
        with_too_large = planner_memory.fit_peaks([*peaks, *too_large], constants)["shared"]
        assert with_too_large.fragmentation < alone.fragmentation - 0.005

    def test_fp8_is_at_most_twice_as_fast_as_bf16(self):
        assert all(max(c.fp8_gain, c.fp8_rowwise_gain) <= 2 for c in map(find_framework, framework_names()))
        vector = planner_fit.to_vector(planner_fit.current()) + 50.0
        assert planner_fit.to_constants(vector, planner_fit.current())["hf"].fp8_gain <= 2

    def test_half_of_the_peaks_are_within_5_percent_also_of_unseen_sources(self):
        all_runs, constants = planner_runs.load()[0], planner_fit.current()
        peaks = planner_memory.stated(all_runs)
        known = [*peaks, *planner_memory.only_ran(all_runs)]
        now = planner_memory.figures([(run, planner_memory.error(run, constants)) for run in peaks])
        assert now["median_error"] < 0.045
        assert planner_memory.figures(planner_memory.leave_one_out(known, constants))["median_error"] < 0.05
        fitted = planner_memory.fit_peaks(known, constants)
        for name in planner_memory.FITTED:
            assert getattr(fitted["shared"], name) == pytest.approx(getattr(shared_constants(), name)), (
                "planner_fit --write"
            )

    def test_wrong_constants_give_bad_peaks(self):
        peaks = planner_memory.stated(planner_runs.load()[0])
        waste = planner_memory.with_values(planner_fit.current(), 1.5, 0.5)
        assert planner_memory.figures([(r, planner_memory.error(r, waste)) for r in peaks])["median_error"] > 0.1

    def test_the_committed_figures_match_this_code(self, runs):
        committed = json.loads((REPOSITORY / "benchmarks" / "results" / "planner_fit.json").read_text())
        constants = planner_fit.current()
        fitted = planner_fit.figures(runs, planner_fit.residuals(runs, constants))
        assert fitted["median_error"] == pytest.approx(committed["fitted"]["median_error"], abs=2e-4)
        peaks = planner_memory.stated(planner_runs.load()[0])
        found = planner_memory.figures([(run, planner_memory.error(run, constants)) for run in peaks])
        assert found["median_error"] == pytest.approx(committed["memory"]["median_error"], abs=2e-4)
        for name, value in committed["constants"].items():
            group, _, constant = name.partition(".")
            assert getattr(constants[group.partition("+")[0]], constant) == pytest.approx(value, rel=1e-3), name

    def test_the_first_choice_is_among_the_fastest_measured(self, runs):
        """For groups of at least three layouts that a source measured on the same machine, mostly BLOOM's."""
        found = planner_choice.figures(runs, planner_fit.residuals(runs, planner_fit.current()))
        assert found["groups"] >= 15
        assert found["within_5_percent"] >= found["groups"] - 3
        assert found["median_reached"] > 0.98

    @pytest.mark.parametrize(("group", "broken"), [("megatron", {"pass_s": 1e-9}), ("shared", {"link_rate": 0.02})])
    def test_wrong_constants_give_a_bad_choice(self, runs, group, broken):
        """Without the cost of a pass that does not depend on its tokens, the smallest micro-batches would be
        chosen."""
        constants = planner_fit.current()
        constants[group] = replace(constants[group], **broken)
        found = planner_choice.figures(runs, planner_fit.residuals(runs, constants))
        assert found["within_5_percent"] < found["groups"] - 4

    def test_wrong_constants_give_bad_figures(self, runs):
        slow = {**planner_fit.current(), "shared": replace(shared_constants(), memory_rate=0.2)}
        errors = planner_fit.residuals(runs, slow)
        assert statistics.median(abs(math.expm1(error)) for error in errors) > 0.2

    def test_a_fit_from_the_priors_lowers_the_error(self, runs):
        some = [run for run in runs if "torchtitan" in run.source]
        before = planner_fit.priors(planner_fit.current())
        after = planner_fit.fit(some, before, rounds=1)
        old, new = (abs(planner_fit.residuals(some, constants)).mean() for constants in (before, after))
        assert new < old


def test_qlora_dequantises_every_matrix_in_every_pass():
    """4 bits and their scales are read and 2 bytes are written per parameter, in forward and backward pass."""
    plain, quantised = (
        estimate_job(job(method=method, dp_shard=1, zero=0, global_batch=1, seq_len=2048))
        for method in ("lora", "qlora")
    )
    model = plain.job.shape
    in_layers = sum(linear.inputs * linear.outputs for linear in model.layer_kinds[0].linears) * model.layers
    memory = plain.job.gpu.memory_tb_s * 1e12 * shared_constants().memory_rate
    expected = 2 * (0.5 + 1 / 16 + 2) * in_layers / memory
    assert quantised.time.compute - plain.time.compute == pytest.approx(expected, rel=0.01)
    recomputed = estimate_job(replace(quantised.job, activation_checkpointing="full")).time.compute
    assert recomputed - estimate_job(
        replace(plain.job, activation_checkpointing="full")
    ).time.compute == pytest.approx(1.5 * expected, rel=0.01)


@pytest.mark.parametrize(
    ("axes", "zero", "ranks"),
    [({"dp_shard": 8}, 3, 8), ({"dp_replicate": 8}, 0, 1), ({"tp": 2, "dp_shard": 4}, 3, 1), ({"pp": 2}, 0, 2)],
)
def test_a_plan_with_muon_contains_its_products_on_the_ranks_that_share_them(axes, zero, ranks):
    framework, shared = find_framework("hf"), shared_constants()
    runs = {name: job(optimizer=name, zero=zero, **axes) for name in ("muon", "adamw")}
    rates = Rates(runs["muon"], framework, shared)
    times = {name: step_time(run, framework, shared).optimizer - framework.step_s for name, run in runs.items()}
    traffic = {name: OPTIMIZERS[name]["traffic_bytes"] for name in runs}
    products_s = MUON_ITERATIONS * runs["muon"].shape.newton_schulz_flops / ranks / rates.bf16_matmul
    assert times["muon"] == pytest.approx(times["adamw"] * traffic["muon"] / traffic["adamw"] + products_s)


def test_fsdp2_copies_what_it_gathers_and_deepspeed_does_not():
    """Two copies of the weights per micro-batch, and one of the gradients into the fp32 buffer of their reduction."""
    sharded = job(zero=3, dp_shard=8, dp_replicate=1, micro_batch=1, global_batch=8)
    rates = Rates(sharded, find_framework("hf"), shared_constants())
    assert _Copies.of(sharded, rates) == _Copies(gathered=2 / rates.memory, scattered=1 / rates.memory)
    offloaded = replace(sharded, offload="full")
    assert _Copies.of(offloaded, rates) == _Copies(own=1 / 64e9)
    assert _Copies.of(replace(sharded, stack="megatron"), rates) == _Copies()
    experts = replace(sharded, shape=find_model("qwen3-30b-a3b"))
    of_copies = experts.shape.total_parameters * (2 * 4 + 2 + 4) / rates.memory
    exposed = step_time(experts, find_framework("hf"), shared_constants()).communication
    gathered = network(shared_constants()).gather_s(8.0 * experts.shape.total_parameters, Group(size=8))
    assert 0.5 * of_copies < exposed - 0.5 * gathered < 2 * (of_copies + gathered)


def test_offloaded_weights_in_4_bits_are_copied_in_4_bits():
    """From the CPU's memory once per pass, each rank its part, while another layer computes."""
    run = job(shape=find_model("llama-2-70b"), gpu=accelerator("RTX4090"), zero=3, dp_shard=2, dp_replicate=1)
    run = replace(run, micro_batch=1, global_batch=2, offload="full", activation_checkpointing="full", compile=False)
    framework = find_framework("hf")
    times = {
        method: step_time(replace(run, method=method), framework, shared_constants()).total
        for method in ("qlora", "lora")
    }
    copied_in_16_bits = 2 * run.shape.total_parameters / 32e9
    assert times["lora"] - times["qlora"] > copied_in_16_bits
    alone = replace(run, global_batch=1, method="qlora", layout=ParallelLayout())
    seconds = step_time(alone, framework, shared_constants()).optimizer
    assert 2 * 0.52 * run.shape.total_parameters / 32e9 < seconds < copied_in_16_bits


def test_megatron_computes_latent_attention_unfused_before_hopper():
    """Keys of 192 and values of 128, as in DeepSeek-V3."""
    shape = find_model("deepseek-v3")
    run = job(stack="megatron", shape=shape, gpu=accelerator("A100-80GB"), seq_len=4096)
    assert run.writes_scores
    assert not replace(run, gpu=accelerator("H100-80GB")).writes_scores
    assert not replace(run, shape=find_model("llama-3.1-8b")).writes_scores
    assert not replace(run, stack="hf").writes_scores
