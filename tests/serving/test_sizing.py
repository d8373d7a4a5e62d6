"""Deployments for a service level, and the frontier of one deployment."""

from itertools import pairwise

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.cli.main import cli
from llmlab.serving.memory import divided_memory
from llmlab.serving.sizing import deployments, frontier, least_utilization, longest_context, separated
from llmlab.specs.model import model

LLAMA = model("meta-llama/Llama-3.1-8B")
H100 = lab.gpu("H100")


def test_more_users_more_throughput_less_speed():
    points = frontier(LLAMA, lab.Service(), H100)
    assert [point.users for point in points][:3] == [1, 2, 4]
    assert all(a.tokens_per_second < b.tokens_per_second for a, b in pairwise(points))
    assert all(0.98 * a.tpot < b.tpot for a, b in pairwise(points))
    assert [point.users for point in frontier(LLAMA, lab.Service(max_num_seqs=4), H100)] == [1, 2, 4]


def test_separate_gpus_for_prompts_meet_the_service_level_with_no_longer_steps():
    service = lab.Service(prompt_len=4000, output_len=200)
    found = separated(LLAMA, service, 20.0, 1.0, 0.015, H100)
    assert found.ttft <= 1 and found.tpot <= 0.015
    reading = 20 * 4000 * 2 * LLAMA.parameters / 989e12  # GPUs that do nothing else, at the peak
    assert reading < found.prefill < 4 * reading
    assert separated(LLAMA, service, 20.0, 1.0, 1e-4, H100) is None


def test_room_for_users():
    """Llama-3.1-8B: a cached token has 131,072 bytes, a request of N users that share the cache so many tokens."""
    cache = divided_memory(LLAMA, lab.Service(), H100).cache
    assert longest_context(LLAMA, lab.Service(), H100, 10) == cache // 10 // 131_072
    assert longest_context(LLAMA, lab.Service(), H100, 1) == LLAMA.max_positions
    assert longest_context(model("meta-llama/Llama-3.1-70B"), lab.Service(), H100, 1) == 0
    share = least_utilization(LLAMA, lab.Service(), H100, 32)
    exact = lab.Service(gpu_memory_utilization=share + 1e-9)
    assert divided_memory(LLAMA, exact, H100).requests == 32
    assert least_utilization(LLAMA, lab.Service(), H100, 10_000) is None


def test_the_cheapest_deployment_meets_the_service_level():
    cards = [lab.gpu(name) for name in ("A100-80GB", "H100", "H200")]
    found = deployments(LLAMA, lab.Service(), 20.0, 1.0, 0.02, cards)
    assert found and all(one.latency.ttft <= 1 and one.latency.tpot <= 0.02 for one in found)
    assert all(one.copies * one.point.requests_per_second >= 20 for one in found)
    assert [one.usd_per_hour for one in found] == sorted(one.usd_per_hour for one in found)
    (quick,) = deployments(LLAMA, lab.Service(prompt_len=2000), 20.0, 0.06, 0.05, cards[1:2])
    assert quick.latency.ttft <= 0.06 and quick.point.service.tp == 8  # with fewer GPUs a prompt takes longer to read
    assert not deployments(LLAMA, lab.Service(), 20.0, 1.0, 1e-4, cards)
    (one,) = deployments(LLAMA, lab.Service(), 20.0, 1.0, 0.02, cards[1:2])
    meet = [point for point in frontier(LLAMA, lab.Service(tp=one.point.service.tp), H100) if point.tpot <= 0.02]
    assert one.copies * max(point.requests_per_second for point in meet) < 2 * 20  # and users wait for each other


def test_the_frontier_is_drawn_with_the_numbers_of_its_table(tmp_path):
    plots = pytest.importorskip("llmlab.plots.frontier")
    picture = tmp_path / "frontier.png"
    words = ["serve", "meta-llama/Llama-3.1-8B", "--gpu", "2xH100", "--frontier", "--plot", str(picture)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    points = frontier(LLAMA, lab.Service(tp=2), H100)
    (axes,) = plots.plot_frontier({"2 × H100": points}).axes
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [1 / point.tpot for point in points]
    assert list(line.get_ydata()) == [point.tokens_per_second / 2 for point in points]
