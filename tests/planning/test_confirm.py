"""Candidates are confirmed by an executor: none is lost with a worker, and Ctrl-C returns the best so far."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

import llmlab as lab
from llmlab.planning import confirm as confirming
from llmlab.planning.confirm import MARGIN, SIMULATED_EAGER, UNDECIDED, confirm, shortened, simulated_run
from llmlab.planning.machines import machines
from llmlab.planning.search import Search
from llmlab.planning.space import Question

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
FIXED = {"seq_len": 64, "offload": None, "compile": False}


def search(gpus="T4", model=TINY, batch=16, **fixed):
    return Search(Question(lab.model(model), batch, fixed={**FIXED, **fixed}), [machines(gpus)])


class Here(Executor):
    """Answers at once: what `answer` returns of a run."""

    def __init__(self, answer):
        self.answer = answer

    def submit(self, function, model, run, card):
        future = Future()
        try:
            future.set_result(self.answer(run, card))
        except BaseException as error:
            future.set_exception(error)
        return future


def fits(run, card):
    return lab.Report(source="simulated", model="tiny", run=run, gpu=card, outcome="fits")


def test_what_its_simulation_refutes_is_replaced():
    refuted = []

    def answer(run, card):
        if run.checkpointing is None:
            refuted.append(run)
            return lab.Report(source="simulated", model="tiny", run=run, gpu=card, outcome="out of memory")
        return fits(run, card)

    done = confirm(search(), Here(answer))
    assert len(refuted) >= 2 and done.refuted == refuted
    assert {each.run.checkpointing for each in done.candidates} == {"selective", "full"}
    assert not {each.run for each in done.candidates} & set(refuted)


def test_one_micro_batch_of_a_layout_is_shown_and_the_next_stands_in():
    done = confirm(search(), Here(fits))
    layouts = [done.key(each) for each in done.candidates]
    assert len(set(layouts)) == len(layouts)
    first = done.candidates[0].run
    refuted = Here(lambda run, card: replace(fits(run, card), outcome="out of memory" if run == first else "fits"))
    again = confirm(search(), refuted)
    stands_in = next(each.run for each in again.candidates if again.key(each) == layouts[0])
    assert stands_in.micro_batch != first.micro_batch


class Impatient(Here):
    """Somebody presses Ctrl-C in the second round: of the first round all but one are refuted."""

    def __init__(self):
        super().__init__(self.first_alone)
        self.asked = []

    def submit(self, function, model, run, card):
        self.asked.append(run)
        if len(self.asked) > 10:
            raise KeyboardInterrupt
        return super().submit(function, model, run, card)

    def first_alone(self, run, card):
        return replace(fits(run, card), outcome="fits" if run == self.asked[0] else "out of memory")


def test_ctrl_c_returns_the_best_so_far():
    plan = lab.plan(TINY, "4xA100-80GB", 16, fixed=FIXED, executor=Impatient())
    assert plan.interrupted and str(plan).startswith("Interrupted, the best so far")
    assert [bool(each.simulation) for each in plan] == [True] + [False] * (len(plan) - 1) and len(plan) > 1
    assert plan[1].unconfirmed == "Interrupted before its simulation."
    assert not {each.run for each in plan} & set(plan.refuted)


def test_a_process_that_dies_is_asked_again_and_then_said():
    deaths = []

    def answer(run, card):
        if run.precision.startswith("autocast") or not deaths:
            deaths.append(run)
            raise BrokenProcessPool("killed")
        return fits(run, card)

    done = confirm(search("4xA100-80GB"), Here(answer))
    ends = {each.run.precision: each.unconfirmed for each in done.candidates}
    assert "died twice" in ends["autocast-bf16"]
    assert ends["mixed-bf16"] == ""  # its first was asked again


def test_the_margin_is_left_free(monkeypatch):
    rooms = []

    def simulated(model, run, gpu, how_much):
        rooms.append(gpu.memory)
        return lab.Report(source="simulated", model="tiny", run=run, gpu=gpu.name, outcome="fits", capacity=gpu.memory)

    monkeypatch.setattr("llmlab.simulation.report.simulated", simulated)
    report = simulated_run(TINY, lab.Training(), "T4")
    assert rooms == [round(lab.gpu("T4").memory * (1 - MARGIN))] and report.capacity == lab.gpu("T4").memory


def test_a_compiled_step_is_simulated_eager():
    run = lab.Training(seq_len=64, dp=2, compile=True, precision="autocast-fp16")
    report = simulated_run(TINY, run, "T4")
    assert report.run == run and report.notes[0].code == "simulated-eager"
    eager = lab.simulate(TINY, replace(run, compile=False), "T4")
    assert report.peak_allocated == eager.peak_allocated


def test_only_the_memory_of_the_simulated_run_itself_has_no_mark():
    """An eager step is an upper bound of the compiled one's memory, and an estimate is no simulation."""
    def answer(run, card):
        eager = () if run.precision == "fp32" else (SIMULATED_EAGER,)
        return "no rule" if run.precision.startswith("autocast") else replace(fits(run, card), notes=eager)

    kinds = {each.run.precision: each.mark for each in confirm(search("4xA100-80GB"), Here(answer)).candidates}
    signs = {precision: mark and mark[0] for precision, mark in kinds.items()}
    assert {"mixed-bf16": "†", "autocast-bf16": "*"}.items() <= signs.items() and signs.get("fp32") is None
    assert kinds["autocast-bf16"][1].endswith("no rule.") and kinds["mixed-bf16"][1] == SIMULATED_EAGER



def test_a_compiled_step_is_simulated_itself_where_the_eager_one_runs_out(monkeypatch):
    asked = []

    def simulated(model, run, gpu, how_much):
        asked.append(run)
        outcome = "fits" if run.compile else "out of memory"
        return lab.Report(source="simulated", model="tiny", run=run, gpu=gpu.name, outcome=outcome, capacity=gpu.memory)

    monkeypatch.setattr("llmlab.simulation.report.simulated", simulated)
    run = lab.Training(compile=True, accumulation=4)
    report = simulated_run(TINY, run, "T4")
    assert asked == [replace(run, compile=False, accumulation=2), replace(run, accumulation=2)]
    assert report.outcome == "fits" and report.run == run and not report.notes
    asked.clear()
    assert simulated_run(TINY, lab.Training(), "T4").outcome == "out of memory" and len(asked) == 1


def test_what_leaves_no_margin_by_its_estimate_is_not_simulated(monkeypatch):
    found = list(search(model="Qwen/Qwen3-0.6B", batch=8, seq_len=2048))
    near = sorted(each.memory for each in found if not each.certain)
    assert near[0] < near[-1]
    monkeypatch.setattr(confirming, "MARGIN", 1 - near[0] / lab.gpu("T4").memory)
    asked = []
    asking = search(model="Qwen/Qwen3-0.6B", batch=8, seq_len=2048)
    confirm(asking, Here(lambda run, card: [asked.append(run), fits(run, card)][1]))
    passed_over = [each.run for each in found if not each.certain and each.memory > near[0]]
    assert asked and not set(asked) & set(passed_over) and asking.cuts[UNDECIDED] == len(passed_over)


def test_an_eager_step_that_is_sure_to_run_out_is_not_simulated_for_the_compiled_one(monkeypatch):
    asked = []

    def simulated(model, run, gpu, how_much):
        asked.append(run.compile)
        return fits(run, gpu.name)

    monkeypatch.setattr("llmlab.simulation.report.simulated", simulated)
    for card in ("T4", "A100-80GB"):
        simulated_run(lab.model("Qwen/Qwen3-0.6B").config, lab.Training(4, 2048, "mixed-fp16", compile=True), card)
    assert asked == [True, False]


def test_what_is_refuted_is_simulated_once(monkeypatch):
    """What it would have needed, which takes a second simulation, is nobody's question."""
    from llmlab.simulation import report

    rooms = []
    real = report.recorded

    def counted(model, run, gpu, **options):
        rooms.append(gpu.memory)
        return real(model, run, gpu, **options)

    monkeypatch.setattr(report, "recorded", counted)
    monkeypatch.setattr(confirming, "_surely_over", lambda *_: False)
    large = {**TINY, "vocab_size": 20_000_000}
    run = lab.Training(micro_batch=1, seq_len=64, precision="autocast-fp16")
    found = simulated_run(large, run, "T4")
    assert found.outcome == "out of memory" and found.where and len(rooms) == 1
    again = lab.simulate(large, run, "T4")
    assert again.needed > again.capacity and len(rooms) == 3


def test_two_of_many_micro_batches_take_what_all_take():
    run = lab.Training(micro_batch=2, seq_len=64, precision="autocast-fp16", accumulation=5)
    short = simulated_run(TINY, run, "T4")
    whole = lab.simulate(TINY, run, "T4")
    assert short.run == run and shortened(run).accumulation == 2
    ids = 3 * 8 * run.tokens  # bytes of three more micro-batches
    assert short.peak_allocated == whole.peak_allocated - ids and short.peak_reserved == whole.peak_reserved


def test_two_workers_of_dask_one_of_them_killed_lose_nothing(monkeypatch):
    """A real cluster on this machine: a worker is killed in the middle of its work, which dask does not give to another
    by itself here, but as an error to us."""
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    monkeypatch.setitem(distributed.config["distributed"]["scheduler"], "allowed-failures", 0)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        victim, pid = next(iter(client.run(os.getpid).items()))

        def work(model, run, card):  # quick, and without torch, but endless in the process that is to be killed
            import os
            from dataclasses import replace

            import llmlab

            while os.getpid() == pid:
                pass
            return replace(llmlab.estimate(model, run, card), source="simulated", outcome="fits")

        monkeypatch.setattr(confirming, "simulated_run", work)

        def kill():
            while not client.processing().get(victim):
                pass
            os.kill(pid, signal.SIGKILL)

        with ThreadPoolExecutor(1) as watching:
            killed = watching.submit(kill)
            done = confirm(search("2xT4"), client.get_executor())
            assert killed.result() is None
        alone = confirm(search("2xT4"), Here(lambda run, card: work(TINY, run, card)))
    assert [each.run for each in done.candidates] == [each.run for each in alone.candidates]
    assert len(done.candidates) == 10 and all(each.simulation for each in done.candidates)


def test_processes_are_the_default(monkeypatch):
    pools = []
    real = confirming._pool

    def counted(executor, workers):
        pools.append((executor, workers))
        return real(ThreadPoolExecutor(1), workers)

    monkeypatch.setattr(confirming, "_pool", counted)
    assert confirm(search(precision="autocast-fp16", checkpointing=None), None).candidates
    assert pools[0] == (None, min(confirming.PROCESSES, os.cpu_count()))


@pytest.mark.parametrize("from_stdin", [True, False])
def test_a_script_that_asks_is_not_run_again_by_the_processes(tmp_path, from_stdin):
    (tmp_path / "quick.py").write_text("def simulated(*_):\n    return 'asked elsewhere'\n")
    script = f"""
import quick
import llmlab as lab
from llmlab.planning import confirm
confirm.simulated_run = quick.simulated
print("once")
print(lab.plan({TINY!r}, "2xA100-80GB", 16, fixed={FIXED!r}).best.unconfirmed)
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "-" if from_stdin else "script.py"], cwd=tmp_path, text=True,
                          input=script, capture_output=True, env=importing(tmp_path))  # fmt: skip
    assert done.stdout == "once\nasked elsewhere\n", done.stderr


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal: a shell without job control starts `make test &` with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="threads block no signals there")
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_waits_until_every_process_has_started():
    """Also one that another thread takes, as that of the progress bar: half started, a process is nobody's to end."""

    def press():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        signal.raise_signal(signal.SIGINT)

    started = []
    with pytest.raises(KeyboardInterrupt), confirming._alone():
        thread = Thread(target=press)
        thread.start()
        thread.join()
        started.append("all")
    assert started == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_terminal_ends_what_is_simulated(tmp_path):
    """As a shell sends it, to every process of the group; these simulations never end by themselves."""
    (tmp_path / "endless.py").write_text("import threading\ndef simulated(*_):\n    threading.Event().wait()\n")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    program = """
import endless
from llmlab.cli.main import main
from llmlab.planning import confirm
confirm.simulated_run = endless.simulated
main()
"""
    words = ["plan", "tiny.json", "--gpus", "2xA100-80GB", "--global-batch", "16", "--fixed", "seq_len=64"]
    ours, theirs = os.openpty()
    plan = subprocess.Popen([sys.executable, "-c", program, *words], cwd=tmp_path, stdout=subprocess.PIPE,
                            stderr=theirs, text=True, start_new_session=True, env=importing(tmp_path))  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"simulating" not in shown:
        shown += os.read(ours, 1 << 12)
    os.killpg(plan.pid, signal.SIGINT)
    said, _ = plan.communicate(timeout=300)
    assert plan.returncode == 0 and said.startswith("Interrupted, the best so far"), said
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):  # when no process has the terminal any more
        while select.select([ours], [], [], 300)[0]:
            shown += os.read(ours, 1 << 12)
    os.close(ours)
    assert b"Traceback" not in shown


def importing(folder):
    """Return an environment in which `folder` and this llmlab are imported."""
    ours = str(Path(lab.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), ours, os.environ.get("PYTHONPATH", "")])}
