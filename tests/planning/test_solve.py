"""What fits: the answer is the last value whose simulation fits, or the smallest GPU."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.base import errors
from llmlab.cli.main import cli
from llmlab.planning.confirm import with_margin

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA, SMALL = "meta-llama/Llama-3.1-8B", replace(lab.gpu("T4"), memory=1 << 30)
RUN = lab.Training(precision="bf16", checkpointing="full", lora=lab.LoRA(rank=16), seq_len=2048)


def test_the_largest_micro_batch_fits_in_a_simulation_and_the_next_does_not():
    solution = lab.solve(TINY, lab.Training(seq_len=512), SMALL, "micro_batch")
    assert solution.best.simulation and solution.over.simulation
    largest = lab.simulate(TINY, solution.run, with_margin(SMALL))
    assert (largest.outcome, solution.over.simulation.outcome) == ("fits", "out of memory")
    value = solution.value
    assert solution.run.micro_batch == value < solution.over.value <= value + max(1, value // 32)
    assert solution.best.left == SMALL.memory - largest.process >= 0.04 * SMALL.memory
    assert solution.outcome == "fits" and solution.to_dict()["value"] == solution.value


def test_where_the_simulation_refutes_even_the_smallest_nothing_fits():
    """One sequence whose tensors alone just fit has no room for the allocator's segments."""
    run = lab.Training(seq_len=512)
    tensors = lab.estimate(TINY, run, SMALL).peak_allocated
    full = replace(SMALL, memory=int((tensors + SMALL.context + (64 << 10)) / 0.96))
    found = lab.solve(TINY, run, full, "micro_batch")
    assert found.value is None and found.over.value == 1 and found.over.simulation.outcome == "out of memory"
    assert lab.estimate(TINY, run, with_margin(full)).outcome == "unknown"
    assert "problem" in {note.code for note in found.notes}


def test_by_estimates_the_answer_is_the_last_that_is_sure_to_fit():
    card = lab.gpu("A100-80GB")  # its context is known, so a plan's margin is all that is left free
    found = lab.solve(LLAMA, RUN, card, "seq_len", simulate=False)
    spare = with_margin(card)
    fits = [lab.estimate(LLAMA, replace(RUN, seq_len=found.value + more), spare).outcome for more in (0, 128)]
    assert fits == ["fits", "unknown"] and found.value % 128 == 0
    assert lab.estimate(LLAMA, replace(RUN, seq_len=found.over.value), spare).outcome == "out of memory"


def test_without_torch_estimates_answer_and_a_note_says_why(monkeypatch):
    by_estimates = lab.solve(LLAMA, RUN, "A100-80GB", simulate=False)
    monkeypatch.setattr(errors, "find_spec", lambda package: None)
    found = lab.solve(LLAMA, RUN, "A100-80GB")
    assert found.value == by_estimates.value
    (note,) = [note for note in found.notes if note.code == "not-simulated"]
    assert "needs torch" in note and "pip install 'llmlab[torch]'" in note


def test_a_larger_rank_needs_more_memory_until_it_does_not_fit():
    small, large = (lab.solve(LLAMA, RUN, name, "lora_rank", simulate=False) for name in ("RTX-5090", "A100-40GB"))
    assert 16 < small.value < large.value <= 4096
    assert small.run == replace(RUN, lora=replace(RUN.lora, rank=small.value))


def test_the_smallest_gpu_has_less_memory_than_all_others_on_which_the_run_fits():
    found = lab.solve(LLAMA, RUN, name="gpu", simulate=False)
    sure = [card.memory for card in lab.gpus() if card.vendor == "NVIDIA" and card.supports_bf16
            and lab.estimate(LLAMA, RUN, with_margin(card)).outcome == "fits"]  # fmt: skip
    assert lab.gpu(found.value).memory == min(sure)
    assert lab.gpu(found.over.value).memory < min(sure)


def test_positions_that_are_learned_limit_the_sequence():
    found = lab.solve("gpt2", lab.Training(), "A100", "seq_len", simulate=False)
    assert found.value == 1024 and found.over is None
    assert {note.code for note in found.notes} == {"limit", "gpu-memory-assumed"}


def test_a_context_of_generation_includes_its_new_tokens():
    run = lab.Inference(new_tokens=500)
    found = lab.solve(LLAMA, run, "RTX-4090", "seq_len", simulate=False)
    assert found.run.prompt_len + 500 == found.run.seq_len == found.value


def test_where_nothing_fits_the_way_out_does():
    run = lab.Training(precision="bf16")
    found = lab.solve(LLAMA, run, "RTX-3090", "seq_len", simulate=False)
    assert found.value is None and found.run is None and found.outcome == "out of memory"
    notes = {note.code: note for note in found.notes}
    larger = sorted(lab.gpus(), key=lambda card: card.memory)
    smallest = next(card for card in larger if card.name in notes["larger-gpu"])
    assert lab.estimate(LLAMA, found.over.report.run, smallest).outcome == "fits"
    short = lab.estimate(LLAMA, found.over.report.run, "RTX-3090")
    assert f"{(short.needed - short.capacity) / 2**30:.2f} GiB more" in notes["problem"]
    assert any(lever.name in notes["lever"] and lever.report.outcome == "fits"
               for lever in lab.fix(LLAMA, found.over.report.run, "RTX-3090").levers)  # fmt: skip


@pytest.mark.parametrize(("run", "gpu", "name", "message"), [
    (lab.Training(), "T4", "batch", "batch is not a field of Training; give micro_batch"),
    (lab.Inference(), "T4", "micro_batch", "give batch"),
    (lab.Training(), "T4", "lora_rank", "give lora="),
    (lab.Training(), None, "seq_len", "none was given"),
    (lab.Training(), "T4", "gpu", "leave one of them out"),
    (lab.Training(), "T4", "speed", "give one of seq_len, micro_batch"),
])  # fmt: skip
def test_a_question_that_cannot_be_says_what_can(run, gpu, name, message):
    with pytest.raises(lab.SpecError, match=message):
        lab.solve("gpt2", run, gpu, name)


@pytest.mark.parametrize(("words", "code", "value"), [
    (["gpt2", "--for", "seq-len", "--gpu", "T4"], 0, 1024),
    ([LLAMA, "--for", "micro-batch", "--gpu", "T4"], 1, None),
    ([LLAMA, "--for", "lora-rank", "--lora", "8", "--gpu", "24GB", "--kernels", "liger"], 2, None),
])  # fmt: skip
def test_the_command_exits_with_whether_anything_fits(words, code, value):
    done = CliRunner().invoke(cli, ["solve", *words, "--no-simulate", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["value"]) == (code, value)
