"""Prices with source and date, the user's price list, and the cost of a run."""

import datetime
import math

import pytest
from planner_jobs import job

from hfscale import plan
from hfscale.errors import ConfigFileError, UnknownHardwareError
from hfscale.facts.hardware import accelerator
from hfscale.facts.prices import Egress, Price, all_egress, all_prices, prices_of, shipped_prices
from hfscale.planner.cost import MTBF_GPU_HOURS, checkpoint_bytes, compare, cost, reliability

ROW = '[[price]]\nprovider = "AWS"\ngpu = "H100"\nregion = "us-east-1"\non_demand_usd = 4.0\n'
EGRESS = '[[egress]]\nprovider = "AWS"\nusd_per_gb = 0\n'
FROM = 'source = "contract"\ndate = "2026-11-01"\n'


class TestPrices:
    def test_every_row_names_a_known_gpu_a_source_and_a_date(self):
        for row in shipped_prices():
            assert accelerator(row.gpu).name == row.gpu
            assert row.source
            assert datetime.date(2026, 1, 1) < row.date
            assert 0.1 < (row.on_demand_usd or row.spot_usd) < 30
            assert row.spot_usd is None or row.on_demand_usd is None or row.spot_usd < row.on_demand_usd

    def test_every_offer_is_listed_once(self):
        keys = [(row.provider, row.gpu, row.region) for row in shipped_prices()]
        assert len(keys) == len(set(keys))

    def test_cheapest_first(self):
        rates = [row.on_demand_usd for row in prices_of(accelerator("H100-80GB"), shipped_prices())]
        assert rates == sorted(rates)

    def test_the_users_row_replaces_the_shipped_one(self, tmp_path):
        path = tmp_path / "prices.toml"
        path.write_text(ROW + FROM)
        rows = [row for row in all_prices(path) if row.provider == "AWS" and row.gpu == "H100-80GB"]
        assert [(row.on_demand_usd, row.source) for row in rows] == [(4.0, "contract")]
        assert len(all_prices(path)) == len(shipped_prices())

    def test_the_users_file_is_found(self, tmp_path, monkeypatch):
        (tmp_path / "hfscale").mkdir()
        (tmp_path / "hfscale" / "prices.toml").write_text(ROW.replace("AWS", "Mine") + FROM)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert "Mine" in {row.provider for row in all_prices()}

    def test_every_egress_price_has_a_source_and_a_provider_with_gpus(self):
        providers = {row.provider for row in shipped_prices()}
        for row in all_egress().values():
            assert row.provider in providers
            assert row.source
            assert 0 <= row.usd_per_gb < 0.2

    def test_the_users_egress_price_replaces_the_shipped_one(self, tmp_path):
        path = tmp_path / "prices.toml"
        path.write_text(EGRESS + FROM)
        assert (all_egress()["aws"].usd_per_gb, all_egress(path)["aws"].usd_per_gb) == (0.09, 0)
        assert set(all_egress(path)) == set(all_egress())

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (EGRESS, "egress 1 has no source"),
            (EGRESS.replace("0", "-1") + FROM, "usd_per_gb is -1"),
            (EGRESS.replace("0", "true") + FROM, "usd_per_gb is True"),
            (EGRESS + 'gpu = "H100"\n' + FROM, "unknown key 'gpu': use provider, usd_per_gb"),
            ("egress = 3", "egress is not a list of tables"),
        ],
    )
    def test_a_wrong_egress_price_is_one_line(self, tmp_path, text, message):
        path = tmp_path / "prices.toml"
        path.write_text(text)
        with pytest.raises(ConfigFileError, match=message) as error:
            all_egress(path)
        assert len(str(error.value).splitlines()) == 1

    def test_age(self):
        row = Price(provider="a", gpu="b", source="c", date=datetime.date(2026, 1, 1))
        assert row.age_days(datetime.date(2026, 4, 2)) == 91

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("price = [", "is not TOML"),
            (ROW, "has no source"),
            (ROW.replace("4.0", "-1.0") + FROM, "on_demand_usd is -1.0"),
            (ROW.replace("4.0", "true") + FROM, "on_demand_usd is True"),
            (ROW.replace("on_demand_usd = 4.0\n", "") + FROM, "has no price"),
            (ROW + FROM.replace("2026-11-01", "soon"), "date is 'soon'"),
            (ROW + FROM + "colour = 1\n", "unknown key 'colour'"),
            ("# Preis in Z\u00fcrich", "is not UTF-8"),
        ],
    )
    def test_a_bad_file_is_one_line(self, tmp_path, text, message):
        path = tmp_path / "prices.toml"
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigFileError) as caught:
            all_prices(path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_an_unknown_gpu_is_refused_with_the_nearest(self, tmp_path):
        path = tmp_path / "prices.toml"
        path.write_text(ROW.replace("H100", "H1000") + FROM)
        with pytest.raises(UnknownHardwareError, match="H1000"):
            all_prices(path)

    def test_a_missing_file_is_one_line(self, tmp_path):
        with pytest.raises(ConfigFileError, match="cannot be read: No such file"):
            all_prices(tmp_path / "none.toml")


class TestCost:
    def test_youngs_interval_loses_least(self):
        found = reliability(job(dp_shard=64), spot=True)
        mtbf = found.mtbf_hours * 3600
        assert found.cadence_s == pytest.approx(math.sqrt(2 * found.save_s * mtbf))

        def lost(interval):
            return found.save_s / interval + (interval / 2 + 600) / mtbf

        assert found.lost_fraction == pytest.approx(lost(found.cadence_s))
        assert lost(found.cadence_s) < min(lost(0.7 * found.cadence_s), lost(1.4 * found.cadence_s))

    def test_time_between_interruptions_falls_with_the_gpus(self):
        assert reliability(job(dp_shard=64), spot=False).mtbf_hours == pytest.approx(MTBF_GPU_HOURS / 64)
        assert reliability(job(dp_shard=64), spot=True, interruptions_per_node_hour=0.1).mtbf_hours == pytest.approx(
            1 / (64 / MTBF_GPU_HOURS + 8 * 0.1)
        )

    def test_llama_3_on_16k_gpus_keeps_over_90_percent(self):
        """arXiv 2407.21783, section 3.3.4: over 90% effective training time."""
        run = job(dp_shard=16384, global_batch=16384)
        assert 0.9 < reliability(run, spot=False).goodput < 0.999

    def test_cost_computed_by_hand(self):
        run = job()
        found = cost(run, tokens=1e9, tokens_per_s=1e5, usd_per_gpu_hour=2.0, provider="x")
        hours = 1e9 / 1e5 / 3600 / reliability(run, spot=False).goodput
        stored = 2 * checkpoint_bytes(run) / 1e9 * 0.023 * hours / 730
        assert found.hours == pytest.approx(hours)
        assert found.usd == pytest.approx(8 * hours * 2.0 + stored)
        assert found.usd_per_million_tokens == pytest.approx(found.usd / 1000)

    def test_egress_of_the_last_checkpoint_is_counted_if_its_price_is_known(self):
        run, options = job(), {"tokens": 1e9, "tokens_per_s": 1e5, "usd_per_gpu_hour": 2.0, "provider": "x"}
        rate = Egress(provider="x", usd_per_gb=0.09, source="a", date=datetime.date(2026, 1, 1))
        stays, leaves = cost(run, **options), cost(run, **options, egress=rate)
        assert stays.egress_usd is None
        assert leaves.egress_usd == pytest.approx(12 * run.shape.total_parameters / 1e9 * 0.09)
        assert leaves.usd - stays.usd == pytest.approx(leaves.egress_usd)

    def test_only_providers_with_a_known_price_have_egress_cost(self):
        rows = prices_of(accelerator("H100-80GB"), shipped_prices())
        for item in compare(job(), rows, tokens=1e9, tokens_per_s=1e5, egress=all_egress()):
            assert (item.egress_usd is None) == (item.provider.casefold() not in all_egress())
        found = plan("llama-3.1-8b", gpu="H100-80GB", gpus=8, tokens=1e9, top=1).choices[0]
        assert {item.provider for item in found.costs if item.egress_usd} == {"AWS", "Azure", "GCP", "Nebius"}

    def test_a_checkpoint_of_lora_holds_the_adapters_only(self):
        assert checkpoint_bytes(job(method="lora")) < 0.01 * checkpoint_bytes(job())

    def test_all_offers_cheapest_first_with_spot_interrupted(self):
        rows = prices_of(accelerator("H200"), shipped_prices())
        found = compare(job(gpu=accelerator("H200")), rows, tokens=1e9, tokens_per_s=1e5)
        assert [item.usd for item in found] == sorted(item.usd for item in found)
        spot = next(item for item in found if item.kind == "spot")
        assert spot.goodput < next(item for item in found if item.kind == "on-demand").goodput
