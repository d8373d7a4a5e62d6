"""A small Llama that is trained long enough for 3 and 4 bits to differ, and the loss that each method adds.

    python -m llmlab.course.experiments.quantization FILE

trains the model and quantizes it again (about 5 minutes on one core), and writes FILE; `results` reads the package's
own. The text is the source code of Python's standard library, of the version that the JSON names, because the
documentation in the package is too short: a model that is trained for long would memorize it.
"""

from __future__ import annotations

import copy
import json
import platform
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data import END_OF_TEXT, tokenizer, windows
from ..architectures.llama import Llama
from ..quantize import awq, gptq
from ..quantize.algorithms.hqq import hqq
from ..quantize.algorithms.rtn import layer_error, relative_error, rtn
from ..quantize.formats import affine
from ..quantize.formats.affine import Quantized
from ..quantize.whole import inputs_of, linears, quantize_model
from ..techniques.training_loop import Recipe, evaluate
from .sweeps import fit, record_file, write

RESULTS = Path(__file__).with_suffix(".json")
VOCAB, BATCH, LENGTH = 1024, 16, 128
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "initializer_range": 0.08,
}  # fmt: skip
LENGTHS = (125, 500)  # steps: 0.3 and 1.0 million tokens
RECIPE = Recipe(micro_batch=BATCH, seq_len=LENGTH, eval_batches=8)  # evaluates on 16,384 tokens
RATE, WARMUP, DECAY = 5e-3, 50, 0.2  # the peak learning rate; the last fifth of each run decays to a tenth of it
SEEDS = (1, 2, 3)  # of the calibration text
CALIBRATION = 8192  # tokens
GROUP = 32
OUTLIERS, FACTOR = 2, 20.0  # features of each norm, and how many times larger their outputs become
SKIPPED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data", "encodings", "ensurepip", "turtledemo"}


class Result(NamedTuple):
    """The held-out loss of one quantized model, in nats per token."""

    steps: int  # of training
    outliers: bool  # whether large features were planted in the activations
    method: str
    group: int  # weights that share a scale; 0: a whole row
    bits: int
    tokens: int  # of the calibration text; 0: none is used
    seed: int
    loss: float


class Layers(NamedTuple):
    """Errors relative to those of rounding to nearest, averaged over the layers of the longest trained model."""

    method: str
    bits: int
    outputs: float  # squared error of a layer's outputs
    weights: float  # squared error of its weights


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the token ids of the training text, and those of the last twentieth of the files, which is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(paths), generator=generator).tolist()  # else the last files would be of one package
    text = END_OF_TEXT.join(paths[i].read_text(encoding="utf-8") for i in order)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_bytes(text.encode())
        ids = torch.tensor(tokenizer(VOCAB, file).encode(text).ids)
    held_out = len(ids) // 20
    return ids[:-held_out], ids[-held_out:]



def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a weight decay of 0.1."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def trained() -> dict[int, Llama]:
    """Return the model after each of LENGTHS: branches of one run at a constant rate, each with a decay of its own."""
    torch.manual_seed(0)
    model = Llama.from_spec(CONFIG)
    optimizer, start, models, ids = adamw(model), 0, {}, texts()[0]
    for steps in LENGTHS:
        branch = round((1 - DECAY) * steps)
        fit(model, optimizer, ids, RECIPE, 0, range(start, branch), lambda step: RATE * min(1, (step + 1) / WARMUP))
        start = branch
        models[steps] = copy.deepcopy(model)
        branch_optimizer = adamw(models[steps])
        branch_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        decay = partial(decaying_rate, steps=steps)
        fit(models[steps], branch_optimizer, ids, RECIPE, 0, range(branch, steps), decay)
        print(steps, f"{held_out_loss(models[steps].eval()):.4f}", flush=True)
    return models


def decaying_rate(step: int, steps: int) -> float:
    """Return the learning rate in the last fifth of a run of `steps`, linear from RATE to a tenth of it."""
    return RATE * (0.1 + 0.9 * (steps - step) / (DECAY * steps))


def held_out_loss(model: torch.nn.Module) -> float:
    """Return the mean loss over windows of the held-out text."""
    return evaluate(model, texts()[1], RECIPE)


def with_outliers(model: Llama, count: int = OUTLIERS, factor: float = FACTOR) -> Llama:
    """Return a copy that computes the same function with outlier features, as larger models have them.

    In each norm, the first `count` gains are multiplied by `factor`, and the columns that read these features are
    divided by it.
    """
    changed = copy.deepcopy(model)
    with torch.no_grad():
        blocks: Any = changed.layers
        for block in blocks:
            attention, mlp = block.self_attn, block.mlp
            for norm, readers in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[:count] *= factor
                for linear in readers:
                    linear.weight[:, :count] /= factor
    return changed


METHODS: dict[str, Callable[[Tensor, Any, int, int | None], Quantized]] = {
    "RTN": lambda w, x, bits, group: rtn(w, bits, group),
    "RTN, clipped": lambda w, x, bits, group: affine.quantize(
        w, bits, "group" if group else "channel", group, symmetric=False, clip="mse"
    ),
    "HQQ": lambda w, x, bits, group: hqq(w, bits, group),
    "GPTQ": lambda w, x, bits, group: gptq(w, x, bits, group),
    "AWQ": lambda w, x, bits, group: awq(w, x, bits, group),
    "AWQ, clipped": lambda w, x, bits, group: awq(w, x, bits, group, clip=True),
}
CALIBRATED = ("GPTQ", "AWQ", "AWQ, clipped")


def calibration(seed: int, tokens: int = CALIBRATION) -> Tensor:
    return windows(texts()[0], tokens // LENGTH, LENGTH, seed + 1_000)


def cost(
    model: Llama, steps: int, outliers: bool, method: str, group: int, bits: int, tokens: int, seed: int
) -> Result:
    """Quantize all linear layers except the head, and return the held-out loss."""
    quantize, text = METHODS[method], calibration(seed, tokens) if tokens else None
    changed = quantize_model(model, lambda w, x: quantize(w, x, bits, group or None), text)
    return Result(steps, outliers, method, group, bits, tokens, seed, held_out_loss(changed))


def layer_errors(model: Llama) -> list[Layers]:
    """Return the errors of all methods at 4 and 3 bits, each relative to rounding, geometric means over the layers."""
    inputs = inputs_of(model, calibration(1), linears(model))
    rows = []
    for bits in (4, 3):
        for method in list(METHODS)[1:]:
            outputs, weights = [], []
            for name, linear in linears(model).items():
                w, x = linear.weight.detach(), inputs[name]
                nearest = rtn(w, bits, GROUP)
                quantized = METHODS[method](w, x, bits, GROUP)
                outputs.append(layer_error(w, quantized, x) / layer_error(w, nearest, x))
                ratio = relative_error(quantized.dequantize(), w) / relative_error(nearest.dequantize(), w)
                weights.append(ratio**2)
            means = (torch.tensor(values).log().mean().exp().item() for values in (outputs, weights))
            rows.append(Layers(method, bits, *means))
    return rows


def plan() -> list[tuple[int, bool, str, int, int, int, int]]:
    """Return the arguments of `cost` for all quantized models: steps, outliers, method, group, bits, tokens, seed."""
    longest = LENGTHS[-1]
    runs = [(steps, False, "RTN", GROUP, bits, 0, 0) for steps in LENGTHS for bits in (8, 5, 4, 3, 2)]
    for outliers, group, widths in ((False, GROUP, (4, 3, 2)), (False, 0, (3,)), (True, GROUP, (3,))):
        for bits in widths:
            for method in METHODS:
                for seed in SEEDS if method in CALIBRATED else (0,):
                    runs.append((longest, outliers, method, group, bits, CALIBRATION * (seed > 0), seed))
    runs += [(longest, False, "GPTQ", GROUP, 3, tokens, seed) for tokens in (256, 32768) for seed in SEEDS]
    return list(dict.fromkeys(runs))


def record(path: Path) -> None:
    """Train and quantize all models, and write the results to `path`."""
    torch.set_num_threads(1)
    models = {(steps, False): model for steps, model in trained().items()}
    model = models[LENGTHS[-1], False]
    models[LENGTHS[-1], True] = with_outliers(model)
    rows = [
        Result(steps, outliers, "none", 0, 16, 0, 0, held_out_loss(exact))
        for (steps, outliers), exact in models.items()
    ]
    for run in plan():
        rows.append(cost(models[run[:2]], *run))
        print(*rows[-1], flush=True)
    training, held_out = texts()
    facts = {
        "python": platform.python_version(), "parameters": model.spec.parameters, "training_tokens": len(training),
        "held_out_tokens": len(held_out),
    }  # fmt: skip
    parts: dict[str, list[Any]] = {"layers": layer_errors(model), "runs": rows}
    write(path, "llmlab.course.experiments.quantization", parts, digits=5, **facts)


@cache
def recorded() -> dict[str, Any]:
    """Return the JSON, with its results as `Result` and `Layers`."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    return data | {"runs": [Result(*row) for row in data["runs"]], "layers": [Layers(*row) for row in data["layers"]]}


def results() -> list[Result]:
    """Return the recorded results."""
    return recorded()["runs"]


if __name__ == "__main__":
    record(record_file())
