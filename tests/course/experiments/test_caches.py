"""Bytes that real caches hold."""

from transformers import AutoConfig, DynamicCache

import llmlab as lab
from llmlab.course.experiments.caches import CONFIG, cache_bytes
from llmlab.formulas.inference import kv_cache_bytes


def test_a_dynamic_cache_has_the_bytes_of_the_formula():
    config = AutoConfig.for_model(**CONFIG)
    with lab.meter("cpu") as meter:
        make = {"one": lambda: DynamicCache(config=config)}
        found = cache_bytes(config, make, (2, 64), "cpu", lambda: meter.allocated)
    assert found == {"one": kv_cache_bytes(lab.model(CONFIG), lab.Inference(batch=2, kv="fp32"), tokens=64)}
