"""`llmlab record` measures what is missing, skips what the GPU cannot, writes at once and keeps to its budget."""

import io

import pytest
from rich.console import Console

from llmlab.archive import PLAN, Item, records
from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.hardware.gpu import gpu
from llmlab.hardware.this_machine import Host
from llmlab.measurement import record as module
from llmlab.measurement.record import record
from llmlab.report import Report
from llmlab.specs.run import Inference, Training

pytestmark = pytest.mark.usefixtures("user_records")

GPT2 = [
    Item("one", "gpt2", Training(seq_len=64, precision="autocast-fp16")),
    Item("one", "gpt2", Training(seq_len=128, precision="autocast-bf16")),
    Item("two", "gpt2", Training(seq_len=256, precision="fp32")),
]


def machine(card="T4", torch="2.13.0"):
    found = gpu(card)
    return Host(
        device="cuda", name=f"NVIDIA {card}", gpu=found, memory=found.memory, cpu="x", cores=2, python="3.11.7",
        versions={"torch": torch}, compute_capability=found.compute_capability,
    )  # fmt: skip


class Bench:
    """A machine whose clock moves only while it measures."""

    def __init__(self, monkeypatch, seconds=10.0):
        self.now, self.seconds, self.asked, self.here = 0.0, seconds, [], machine()
        monkeypatch.delenv("LLMLAB_AS", raising=False)
        monkeypatch.setattr(module, "host", lambda: self.here)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "_measure", self.measure)

    def measure(self, model, run):
        self.asked.append((model, run))
        self.now += self.seconds
        return Report(
            source="measured", model=model, run=run, gpu=self.here.gpu.name, outcome="fits", peak_allocated=1000,
            environment={"torch": self.here.versions["torch"], "date": "2026-01-01"},
            timeline=(("load", {"weights": 1}),),
        )  # fmt: skip


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def run_plan(plan=GPT2, **more):
    out = io.StringIO()
    return record(plan=plan, console=Console(file=out, width=400), **more), out.getvalue()


def test_what_is_missing_is_measured_and_found_again(bench, user_records):
    done, printed = run_plan(plan=GPT2[::2])
    assert [report.run for report in done.measured] == [item.run for item in GPT2[::2]]
    assert done.path == user_records / "t4" / "measured.json" and done.left == 0
    assert len(records("gpt2", gpu="T4", source="measured")) == 2
    assert "[2/2] gpt2" in printed and "2 measured" in printed


def test_the_second_call_measures_only_what_the_first_left(bench):
    first, _ = run_plan(plan=GPT2[:1])
    assert len(first.measured) == 1
    second, printed = run_plan(plan=[GPT2[0], GPT2[2]])
    assert second.known == 1 and [report.run for report in second.measured] == [GPT2[2].run]
    assert "1 measured, 1 known already" in printed
    third, _ = run_plan(plan=[GPT2[0], GPT2[2]])
    assert third.known == 2 and third.measured == () and len(bench.asked) == 2


def test_another_torch_or_another_card_is_measured_anew(bench, user_records):
    run_plan(plan=GPT2[:1])
    bench.here = machine(torch="2.14.0")
    assert len(run_plan(plan=GPT2[:1])[0].measured) == 1
    bench.here = machine("A100-80GB")
    done, _ = run_plan(plan=GPT2[:1])
    assert len(done.measured) == 1 and done.path == user_records / "a100-80gb" / "measured.json"
    assert len(records("gpt2", source="measured", folder=user_records)) == 3


def test_bf16_is_skipped_on_a_t4_with_the_reason(bench):
    done, printed = run_plan()
    assert [item for item, _ in done.skipped] == [GPT2[1]]
    assert "T4 has no bf16 units" in done.skipped[0][1] and "skipped, T4 has no bf16 units" in printed
    bench.here = machine("A100-80GB")
    assert run_plan()[0].skipped == ()


def test_states_that_cannot_fit_are_not_tried(bench):
    plan = [Item("one", "meta-llama/Llama-3.1-8B", Training(seq_len=8)), Item("one", "gpt2", Training(seq_len=8))]
    done, _ = run_plan(plan=plan)
    ((item, reason),) = done.skipped
    assert item.model == "meta-llama/Llama-3.1-8B" and "weights, gradients, optimizer alone take 119" in reason
    assert bench.asked == [("gpt2", Training(seq_len=8))]


def test_running_out_of_memory_is_a_result(bench, monkeypatch):
    def full(model, run):
        report = Report(
            source="measured", model=model, run=run, gpu="T4", outcome="out of memory", where="backward",
            environment={"torch": "2.13.0", "date": "2026-01-01"},
        )  # fmt: skip
        return report

    monkeypatch.setattr(module, "_measure", full)
    done, printed = run_plan(plan=GPT2[:1])
    assert done.measured[0].outcome == "out of memory" and "out of memory in backward" in printed
    assert run_plan(plan=GPT2[:1])[0].known == 1


def test_the_budget_is_kept_and_the_rest_is_left(bench):
    plan = [Item("one", "gpt2", Training(seq_len=length)) for length in (64, 65, 66, 67, 68)]
    done, printed = run_plan(plan=plan, budget_seconds=45)
    # 10 s each, twice that is allowed for: at 0, 10 and 20 s there is room, at 30 s there is not.
    assert len(done.measured) == 3 and done.left == 2 and bench.now <= 45
    assert "2 left: run it again" in printed
    again, _ = run_plan(plan=plan, budget_seconds=45)
    assert again.known == 3 and len(again.measured) == 2 and again.left == 0


def test_a_step_ten_times_the_work_is_expected_to_take_ten_times_as_long(bench):
    small, big = Item("one", "gpt2", Training(seq_len=100)), Item("one", "gpt2", Training(seq_len=1000))
    done, _ = run_plan(plan=[small, big, Item("one", "gpt2", Training(seq_len=101))], budget_seconds=100)
    assert [report.run.seq_len for report in done.measured] == [100, 101] and done.left == 1


def test_what_was_measured_before_a_crash_is_kept(bench, monkeypatch, user_records):
    def crash_at_256(model, run):
        if run.seq_len == 256:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return bench.measure(model, run)

    monkeypatch.setattr(module, "_measure", crash_at_256)
    with pytest.raises(RuntimeError):
        run_plan()
    assert [report.run for report in records("gpt2", folder=user_records)] == [GPT2[0].run]


def test_a_library_that_is_missing_skips_what_needs_it(bench, monkeypatch):
    def no_library(model, run):
        raise NotAvailable("bitsandbytes is not installed")

    monkeypatch.setattr(module, "_measure", no_library)
    done, _ = run_plan(plan=GPT2[:1])
    assert done.skipped == ((GPT2[0], "bitsandbytes is not installed"),) and done.measured == ()


def test_only_the_chapters_asked_for(bench):
    done, _ = run_plan(only="two")
    assert [report.run for report in done.measured] == [GPT2[2].run]
    with pytest.raises(UnknownName, match="chapters three need no measurements; these do: one, two"):
        run_plan(only=["two", "three"])


def test_records_keep_no_timeline(bench, user_records):
    run_plan(plan=GPT2[:1])
    (report,) = records("gpt2", folder=user_records)
    assert report.timeline == ()


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_above_zero(bench, budget):
    with pytest.raises(SpecError, match="budget_seconds"):
        run_plan(budget_seconds=budget)


def test_without_a_gpu_it_says_what_to_do(bench, tmp_path):
    bench.here = Host("cpu", "some CPU", None, 2**34, "some CPU", 2, "3.11.7", {"torch": "2.13.0"})
    with pytest.raises(NotAvailable, match=r"CUDA GPU.*Colab"):
        run_plan()
    with pytest.raises(NotAvailable, match="--out DIR"):
        run_plan(allow_cpu=True)
    bench.here = Host("cpu", "some CPU", None, 2**34, "some CPU", 2, "3.11.7", {})
    with pytest.raises(NotAvailable, match="needs torch"):
        run_plan(allow_cpu=True, out=tmp_path)


def test_a_pretended_card_leaves_no_records(bench, monkeypatch, user_records):
    bench.here = machine("A100-80GB")
    monkeypatch.setenv("LLMLAB_AS", "t4")
    with pytest.raises(NotAvailable, match=r"LLMLAB_AS=t4 is set: records are of real GPUs"):
        run_plan()
    assert list(user_records.rglob("*.json")) == []


def test_a_card_that_is_not_in_the_table_keeps_its_drivers_name(bench):
    other = Host(
        "cuda", "NVIDIA GeForce RTX 2080", None, 8 * 2**30, "x", 2, "3.11.7", {"torch": "2.13.0"},
        compute_capability=(7, 5),
    )  # fmt: skip
    assert module.gpu_of(other) == "NVIDIA GeForce RTX 2080"
    assert module.cannot(GPT2[1], other) == "NVIDIA GeForce RTX 2080 has no bf16 units"
    assert module.cannot(GPT2[0], other) is None
    half = Item("one", "gpt2", Inference(weights="bf16", kv="bf16", prompt_len=64, new_tokens=8))
    assert "bf16" in module.cannot(half, other)


def test_a_real_step_on_this_cpu_is_measured_written_and_not_repeated(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMLAB_AS", raising=False)
    here = module.host()
    cpu = Host("cpu", here.cpu, None, here.memory, here.cpu, 2, here.python, here.versions)
    monkeypatch.setattr(module, "host", lambda: cpu)
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text(
        '{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 64,'
        ' "bos_token_id": 0, "eos_token_id": 0}'
    )
    plan = [Item("one", str(config.parent), Training(micro_batch=2, seq_len=32))]
    done, _ = run_plan(plan=plan, allow_cpu=True, out=tmp_path / "out")
    (report,) = done.measured
    assert report.source == "measured" and report.outcome == "fits" and report.peak_allocated > 0
    assert done.path == tmp_path / "out" / "cpu" / "measured.json"
    (read,) = records(plan[0].model, plan[0].run, gpu="cpu", folder=tmp_path / "out")
    assert (read.peak_allocated, read.phases, read.parts) == (report.peak_allocated, report.phases, report.parts)
    assert run_plan(plan=plan, allow_cpu=True, out=tmp_path / "out")[0].known == 1


def test_on_a_t4_half_of_the_chapter_on_memory_runs():
    here, plan = machine(), [item for item in PLAN if item.chapter == "memory-anatomy"]
    can = [item for item in plan if module.cannot(item, here) is None]
    assert len(can) > len(plan) / 2 and all("bf16" not in repr(item.run) for item in can)
    assert len([item for item in PLAN if module.cannot(item, machine("A100-80GB")) is None]) == len(PLAN)
