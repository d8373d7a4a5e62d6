"""A plan: every candidate holds the global batch, fits by its simulation, and says why it lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.cli.main import cli
from llmlab.planning.search import Search, layouts, machines

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    with ThreadPoolExecutor(1) as one:
        return lab.plan(TINY, "4xA100-80GB", 16, fixed={"seq_len": 128, "pp": 1}, tokens=10**9, executor=one)


def test_a_plan_holds_the_batch_and_is_confirmed(tiny):
    assert len(tiny) >= 3 and tiny.best is tiny[0]
    for candidate in tiny:
        assert candidate.run.global_batch == 16 and candidate.run.world_size == 4
        assert candidate.simulation is not None or candidate.unconfirmed
        assert candidate.simulation is None or candidate.simulation.outcome != "out of memory"
    assert any(candidate.simulation for candidate in tiny)


def test_the_fastest_is_first_and_the_others_say_why_not(tiny):
    seconds = [candidate.report.step_seconds for candidate in tiny]
    assert seconds == sorted(seconds)
    assert tiny.best.lost == "" and all(candidate.lost for candidate in tiny[1:])
    assert tiny.best.days(10**9) == pytest.approx(10**9 / tiny.best.report.tokens_per_second / 86_400)


def test_nothing_that_was_cut_would_have_fitted():
    """Memory grows with the micro-batch: what is beyond the first that does not fit is cut, and does not fit."""
    spec, where = lab.model("gpt2-xl"), machines("T4")
    search = Search(spec, where, 16)
    for kept in layouts(spec, where, "full", (), {}):
        search.layout(kept)
    assert search.cut > 0
    found = {report.run for report in search.found}
    for precision in ("autocast-fp16", "mixed-fp16"):
        for checkpointing in (None, "selective", "full"):
            for micro_batch in (1, 2, 4, 8, 16):
                run = lab.Training(micro_batch=micro_batch, accumulation=16 // micro_batch, precision=precision,
                                   checkpointing=checkpointing)  # fmt: skip
                if run not in found:
                    assert lab.estimate("gpt2-xl", run, "T4").outcome == "out of memory"


def test_where_nothing_fits_the_nearest_that_does_is_named():
    plan = lab.plan("meta-llama/Llama-3.1-8B", "T4", 8)
    assert not plan and plan.best is None
    assert any(line.startswith("Another method: qlora") for line in plan.nearest)
    assert any(line.startswith("A larger card") for line in plan.nearest)


@pytest.mark.parametrize(("text", "counts"), [("T4", (1, 1)), ("8xT4", (1, 8)), ("2x4xT4", (2, 4)), ("16xT4", (2, 8))])
def test_machines_are_read(text, counts):
    found = machines(text)
    assert (found.nodes, found.per_node) == counts and found.card.name == "T4"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpus": "8xT5"}, "unknown GPU 'T5'"),
        ({"gpus": "12xT4"}, "nodes have 8 GPUs"),
        ({"gpus": "0xT4"}, "at least one GPU"),
        ({"global_batch": 0}, "global_batch=0 is too small"),
        ({"tokens": 0}, "tokens=0 is too small"),
        ({"within": 3.0}, "needs tokens="),
        ({"method": "half"}, "method='half' is not one of"),
        ({"goal": "best"}, "goal='best' is not one of"),
        ({"allow": ("magic",)}, "allow='magic' is not one of"),
        ({"fixed": {"sequence": 1}}, "fixed='sequence' is no field"),
        ({"fixed": {"optimizer": "sgd"}, "allow": ("optimizer",)}, "drop one of the two"),
        ({"fixed": {"lora": lab.LoRA()}}, "contradict each other"),
    ],
)
def test_bad_input_is_a_sentence(asked, says):
    question = {"gpus": "T4", "global_batch": 8, **asked}
    with pytest.raises((lab.SpecError, lab.UnknownName), match=says):
        lab.plan("gpt2", question.pop("gpus"), question.pop("global_batch"), **question)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "gpt2", "--gpus", "T5", "--global-batch", "8"], 2),
        (["plan", "gpt2", "--gpus", "T4", "--global-batch", "8", "--fixed", "seq_len"], 2),
        (["plan", "meta-llama/Llama-3.1-8B", "--gpus", "T4", "--global-batch", "8", "--json"], 1),
        (["fix", "gpt2"], 2),
        (["fix", "gpt2", "--gpu", "T4", "--micro-batch", "8"], 0),
    ],
)
def test_the_commands_exit_codes(words, code):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == code
    assert "Traceback" not in done.output


def test_fix_reads_torchs_message_from_stdin():
    message = (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 14.00 GiB total capacity; 12.00 GiB already allocated; "
        "0.50 GiB free; 13.00 GiB reserved in total by PyTorch)"
    )
    done = CliRunner().invoke(cli, ["fix"], input=message)
    assert done.exit_code == 0 and "expandable_segments" in done.output
