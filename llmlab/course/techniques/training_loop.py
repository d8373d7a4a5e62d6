"""A whole training run from scratch: data, loss, warm-up and cosine, clipping, AdamW, evaluation, checkpoint.

    python -m llmlab.course.techniques.training_loop --steps 360 --out FOLDER

trains a small Llama on the Python documentation and writes a folder that transformers' from_pretrained reads. With
--small in place of --steps, it repeats the longer run that trained llmlab/course/architectures/small_llama.

    B  micro_batch     S  seq_len     V  vocabulary
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.errors import SpecError
from ...data import PYTHON_DOCS, split, tokenizer, windows
from ..architectures.gpt import GPT
from ..architectures.llama import Llama
from ..architectures.small import CONFIG, RECIPE, STRIDE, TEXT, TOKENIZER, WEIGHTS, WINDOW, sha256, small_model
from ..evaluate import perplexity
from .learning_rate import warmup_cosine

# 2.5 million parameters, 5 MB in half precision: two cores train on 180,000 tokens in half a minute. Widths are
# multiples of 256, the largest block of a number format (GGUF's K-quants; NF4 has blocks of 64), so every format fits.
# Narrower matrices need larger initial weights: 0.05 at a width of 256 corresponds to 0.02 at GPT-2's width of 768.
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
SMALL_GPT: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 1024, "n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 1024,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run. The same seed gives the same batches, and so the same losses."""

    steps: int = 360
    micro_batch: int = 4  # sequences per step
    seq_len: int = 128  # tokens per sequence
    learning_rate: float = 2e-3  # the highest, reached after the warm-up
    warmup: int = 30  # steps: small first updates, which permit a larger peak
    final: float = 0.1  # fraction of learning_rate at which the cosine ends
    weight_decay: float = 0.1
    clip: float = 1.0  # largest joint norm of all gradients
    eval_every: int = 40  # steps
    eval_batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.micro_batch, self.eval_every, self.eval_batches) < 1 or self.seq_len < 2:
            raise SpecError(f"{self} has a count below 1 (seq_len: below 2, where there is no next token)")
        if not 0 <= self.warmup < self.steps:
            raise SpecError(f"warmup={self.warmup} is outside 0 <= warmup < steps={self.steps}")


# --small: many epochs over a short text; the strong weight decay prevents memorizing it. Windows fill the context.
SMALL = Recipe(steps=500, micro_batch=2, seq_len=1024, weight_decay=3.0, eval_every=50)


@dataclass
class History:
    """Results of a run: one entry per step in `losses` and `grad_norms`, (step, loss) pairs in `evaluations`."""

    losses: list[float] = field(default_factory=list)  # nats per token of the step's batch, before the update
    grad_norms: list[float] = field(default_factory=list)  # before clipping
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # nats per token of held-out text
    tokens: int = 0
    seconds: float = 0.0


def next_token_loss(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
    """Return the mean of −ln p(token t + 1 | tokens to t), in nats.

    The logits at position t predict the id at t + 1.
    """
    predicted, answers = logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()
    return F.cross_entropy(predicted.float(), answers)


def batch_seed(seed: int, step: int) -> int:
    """Return the seed of a step's batch: different for each step, and for each seed below a million steps."""
    return seed * 1_000_003 + step


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate of `step`, counted from 0. It is above 0 in step 0, and the warm-up ends at the peak."""
    return recipe.learning_rate * warmup_cosine(step + 1, recipe.warmup, recipe.steps, recipe.final)


def adamw(model: nn.Module, recipe: Recipe) -> Optimizer:
    """Return AdamW that decays matrices and embeddings, but neither norms nor biases; fused launches fewer kernels."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def evaluate(model: nn.Module, ids: Tensor, recipe: Recipe, loss: Callable[..., Tensor] = next_token_loss) -> float:
    """Return the mean loss over windows of `ids` that are the same in every call; restores train or eval mode."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    batches = [windows(ids, recipe.micro_batch, recipe.seq_len, seed) for seed in range(recipe.eval_batches)]
    mean = sum(loss(model(batch.to(device)), batch.to(device)).item() for batch in batches) / len(batches)
    model.train(was_training)
    return mean


def train(
    model: nn.Module,
    training: Tensor,
    validation: Tensor,
    recipe: Recipe,
    optimizer: Optimizer | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = next_token_loss,
) -> History:
    """Train `model` in place on windows of the ids `training`, (tokens,).

    Return the history of the run. `model(ids_BS)` returns the logits, (B, S, V).
    `optimizer` is by default `adamw(model, recipe)`; the learning rates of its groups
    follow the schedule. Raises SpecError if a text is shorter than a window.
    """
    device = next(model.parameters()).device
    optimizer = optimizer or adamw(model, recipe)
    history, start = History(), time.perf_counter()
    torch.manual_seed(recipe.seed)  # dropout
    model.train()
    for step in range(recipe.steps):
        if step % recipe.eval_every == 0:
            held_out = evaluate(model, validation, recipe, loss)
            history.evaluations.append((step, held_out))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        # A step's number determines its batch, so a run that resumes at step n needs
        # no state of a sampler.
        seed = batch_seed(recipe.seed, step)
        ids_BS = windows(training, recipe.micro_batch, recipe.seq_len, seed).to(device)
        step_loss = loss(model(ids_BS), ids_BS)
        optimizer.zero_grad()
        step_loss.backward()
        # After backward and before the update.
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        history.losses.append(step_loss.item())
        history.grad_norms.append(norm.item())
        history.tokens += ids_BS.numel()
    held_out = evaluate(model, validation, recipe, loss)
    history.evaluations.append((recipe.steps, held_out))
    history.seconds = time.perf_counter() - start
    return history


def save(model: GPT | Llama, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write model.safetensors and config.json, which transformers' from_pretrained reads."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to("cpu", dtype).contiguous() for name, weight in model.transformers_state().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.spec.config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_recipe(folder: Path, recipe: Recipe, history: History, held_out: Tensor) -> float:
    """Write recipe.json next to the files of `save`, for `course.architectures.small`; return the perplexity in it.

    This is the perplexity of the ids `held_out`, (tokens,), under the weights in the file, rounded to half precision.
    """
    path = folder / RECIPE
    facts: dict[str, Any] = {
        "command": "python -m llmlab.course.techniques.training_loop --small --out FOLDER",
        "recipe": asdict(recipe),
        "tokens": history.tokens,
        "seconds": round(history.seconds),
        "torch": torch.__version__,
        "sha256": {name: sha256(folder / name) for name in (WEIGHTS, CONFIG, TOKENIZER)} | {TEXT.name: sha256(TEXT)},
    }
    path.write_text(json.dumps(facts), encoding="utf-8")
    facts |= {"perplexity": round(perplexity(small_model(folder), held_out, WINDOW, STRIDE), 4)}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts["perplexity"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small model from scratch.")
    parser.add_argument("--model", choices=("llama", "gpt"), default="llama")
    parser.add_argument("--source", default=PYTHON_DOCS, help="python-docs, a text file or hf:OWNER/NAME")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float16", help="of the weights in the file"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where model, config and tokenizer are written")
    parser.add_argument("--small", action="store_true", help="the run that made the small Llama, on its own text")
    for setting in fields(Recipe):
        name = "--" + setting.name.replace("_", "-")
        default = f"default {setting.default}, with --small {getattr(SMALL, setting.name)}"
        parser.add_argument(name, type=type(setting.default), help=default)
    options = parser.parse_args(arguments)
    values = {setting.name: getattr(options, setting.name) for setting in fields(Recipe)}
    recipe = replace(SMALL if options.small else Recipe(), **{k: v for k, v in values.items() if v is not None})
    if options.small:
        options.model, options.source = "llama", TEXT
    torch.manual_seed(recipe.seed)
    model = Llama.from_spec(SMALL_LLAMA) if options.model == "llama" else GPT.from_spec(SMALL_GPT)
    training, validation = split(model.spec.vocab, options.source)
    history = train(model.to(options.device), training, validation, recipe)
    for step, loss in history.evaluations:
        print(f"step {step:6}: {loss:.3f} nats per held-out token")
    print(f"{model.spec.parameters:,} parameters, {history.tokens:,} tokens in {history.seconds:.0f} s")
    if options.out:
        save(model, options.out, getattr(torch, options.dtype))
        tokenizer(model.spec.vocab, options.source).save(str(options.out / TOKENIZER))
        if options.small:
            print(f"held-out perplexity {write_recipe(options.out, recipe, history, validation):.4f}")


if __name__ == "__main__":
    main()
