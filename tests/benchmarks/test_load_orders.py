"""A step's requests made again in another order of loading are those of a simulation that loads in that order."""

from functools import partial

import pytest

import llmlab as lab
from benchmarks.memory.load_orders import requests_of
from benchmarks.memory.past_releases import cache_kept_by_peft, read_ahead
from llmlab.base.errors import NotAvailable
from llmlab.simulation.report import simulated
from llmlab.step.quantized import one_at_a_time

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

LLAMA = {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 2816, "vocab_size": 9000,
         "max_position_embeddings": 256, "tie_word_embeddings": False}  # fmt: skip
RUN = lab.Training(micro_batch=1, seq_len=64, precision="fp16", checkpointing="full", quantization="nf4",
                   lora=lab.LoRA(rank=8, targets=("q_proj", "v_proj")))  # fmt: skip


def peaks(report):
    return report.peak_allocated, report.peak_reserved, dict(report.phases)


def test_in_the_order_of_the_simulation_the_peaks_are_its_own():
    requests = requests_of(LLAMA, RUN, "T4")
    assert tuple(requests.in_order(one_at_a_time(requests.sizes))) == peaks(lab.simulate(LLAMA, RUN, "T4"))


def test_in_the_orders_of_threads_the_peaks_are_those_of_simulations_that_load_so():
    with cache_kept_by_peft():
        requests = requests_of(LLAMA, RUN, "T4")
        asked_as_threads_load = requests_of(LLAMA, RUN, "T4", load_order=partial(read_ahead, seed=0))
        found = [requests.in_order(read_ahead(requests.sizes, seed)) for seed in range(4)]
        for seed, each in enumerate(found):
            order = partial(read_ahead, seed=seed)
            assert tuple(each) == peaks(simulated(LLAMA, RUN, "T4", load_order=order))
            assert asked_as_threads_load.in_order(order(requests.sizes)) == each
    assert len({each.reserved for each in found}) > 1  # the order tells


def test_generation_has_its_phases_too():
    run = lab.Inference(batch=1, prompt_len=16, new_tokens=3, weights="nf4")
    requests = requests_of(LLAMA, run, "A10G")
    assert tuple(requests.in_order(one_at_a_time(requests.sizes))) == peaks(lab.simulate(LLAMA, run, "A10G"))


def test_a_tied_head_takes_no_memory_when_a_quantized_model_is_loaded():
    vocabulary = 90_000
    tied = {**LLAMA, "vocab_size": vocabulary, "tie_word_embeddings": True}
    requests = requests_of(tied, lab.Inference(batch=1, prompt_len=16, new_tokens=3, weights="nf4"), "A10G")
    embedding = 2 * vocabulary * LLAMA["hidden_size"]
    parts = (requests.before, *requests.read.values(), *requests.taken.values(), requests.after)
    sizes = [value[1] for part in parts for what, value in part if what == "malloc"]
    assert sum(embedding <= size < embedding + 512 for size in sizes) == 1


def test_a_step_that_does_not_fit_has_no_peaks_and_all_its_requests():
    """The requests come from a GPU with room for them, so that another order may still be found to fit."""
    requests = requests_of(LLAMA, RUN, "T4")
    order = list(one_at_a_time(requests.sizes))
    needed = requests.in_order(order).reserved
    assert requests._replace(room=needed).in_order(order).reserved == needed
    assert requests._replace(room=needed // 2).in_order(order) is None
    assert len(requests_of(LLAMA, RUN, "T4").after) == len(requests.after)


def test_a_card_without_cuda_is_refused_as_by_simulate():
    with pytest.raises(NotAvailable):
        requests_of(LLAMA, RUN, "MI300X")


def test_among_the_requests_are_the_reset_of_the_peaks_and_pefts_emptied_cache():
    asked = [what for what, _ in requests_of(LLAMA, RUN, "T4").after]
    assert asked.count("reset_peak") == 1 and asked.count("empty_cache") == 1
    with cache_kept_by_peft():
        assert "empty_cache" not in [what for what, _ in requests_of(LLAMA, RUN, "T4").after]
