"""What a type checker sees of the public API: `make lint` has mypy read this file, nothing runs it.

A line marked `type: ignore` is a user's mistake: where it is not found any more, mypy reports the mark as unused.
"""

from pathlib import Path

import numpy as np
import torch
from typing_extensions import assert_type

import llmlab as lab
from llmlab import data
from llmlab.archive import Figure, figure
from llmlab.course import kernels, quantize
from llmlab.course.architectures.llama import Llama
from llmlab.course.architectures.small import small_model
from llmlab.course.inference import (
    BlockPool,
    GrowingCache,
    PagedCache,
    Request,
    Scheduler,
    Speculation,
    generate,
    speculate,
)
from llmlab.course.quantize.formats.affine import Quantized
from llmlab.course.quantize.whole import quantize_model
from llmlab.hardware.scale import Scale
from llmlab.plots import plot_curve
from llmlab.specs.run import Precision


def the_verbs(config: dict[str, object], path: Path, card: lab.GPU) -> None:
    run = lab.Training(precision="autocast-bf16", quantization="nf4", lora=lab.LoRA(rank=16, targets=("q_proj",)))
    assert_type(run.precision, Precision)
    assert_type(lab.model("gpt2"), lab.ModelSpec)
    assert_type(lab.estimate("gpt2", run, "T4"), lab.Report)
    assert_type(lab.simulate(lab.model(config), run, card), lab.Report)
    assert_type(lab.measure(path, lab.Inference(kv="bf16")), lab.Report)
    assert_type(lab.records("gpt2"), list[lab.Report])
    assert_type(lab.compare(config, run), lab.Comparison)
    assert_type(lab.scale(), Scale)
    assert_type(figure("zero-7.5b-mixed-adam"), Figure)
    lab.Training(precision=lab.scale().precision)


def memory() -> None:
    with lab.simulator("T4") as sim, lab.meter() as meter:
        assert_type(sim.peak_allocated, int)
        assert_type(sim.peak_reserved, int)
        assert_type(meter.peak_allocated, int)


def kernels_and_formats(x: torch.Tensor, weight: np.ndarray) -> None:
    assert_type(kernels.softmax(x), torch.Tensor)
    assert_type(kernels.rms_norm(x, x, rung=1), torch.Tensor)
    assert_type(kernels.attention(x, x, x), torch.Tensor)
    assert_type(quantize.gptq(x, x), Quantized)
    assert_type(quantize.nf4.encode(x), tuple[torch.Tensor, torch.Tensor])
    assert_type(quantize.nf4.encode(weight), tuple[np.ndarray, np.ndarray])
    assert_type(quantize.gguf.encode("Q4_K", x), bytes)
    assert_type(data.tokens(), torch.Tensor)


def text(ids: torch.Tensor) -> None:
    model = small_model()
    assert_type(quantize_model(model, lambda weight, _: weight), Llama)
    assert_type(generate(model, ids, 4, temperature=0.7), torch.Tensor)
    assert_type(Scheduler(model).submit([1, 2], 4), Request)
    pages = PagedCache(BlockPool(64))
    assert_type(speculate(model, model, ids, 4, GrowingCache(), pages, temperature=1.0), Speculation)


def mistakes(report: lab.Report) -> None:
    lab.Training(precision="fp17")  # type: ignore[arg-type]
    lab.Training(optimizer="adam")  # type: ignore[arg-type]
    lab.model(124)  # type: ignore[arg-type]
    lab.estimate("gpt2", "T4")  # type: ignore[arg-type]
    kernels.soft_max(torch.ones(1))  # type: ignore[attr-defined]
    quantize.gptqq(torch.ones(1))  # type: ignore[attr-defined]
    speculate(small_model(), small_model(), torch.ones(1), 4, topk=3)  # type: ignore[call-arg]
    plot_curve([1], {"a": [2]}, "x")  # type: ignore[call-arg]
    report.peak_allocated + 1  # type: ignore[operator]
