"""Train your LLM, from text to a server that answers, in one script. Read it from top to bottom.

    text -> tokenizer -> packed data -> pretraining -> LoRA -> evaluation -> quantization -> serving

    python -m llmlab.course.capstone --out run                 # the toy: about a minute on two cores
    python -m llmlab.course.capstone --out run-t4 --scale t4   # for a GPU with 16 GB
    torchrun --nproc-per-node 2 -m llmlab.course.capstone --out run-torchrun
    accelerate launch --config_file plan/accelerate.yaml -m llmlab.course.capstone --out run-accelerate \
        --engine accelerate
    deepspeed --num_accelerators 2 --module llmlab.course.capstone --out run-deepspeed --engine deepspeed \
        --settings plan/ds_config.json

Give each run a folder of its own, because a finished run does not train again. `llmlab.write` writes the files in
plan/. Kill the script at any moment, and start it again with the same command: it continues from its last checkpoint.
On a CPU, the final weights equal those of an uninterrupted run bit for bit.

    B  sequences of a step     S  tokens per sequence     V  vocabulary
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import NotAvailable, SpecError
from ..data import END_OF_TEXT, PYTHON_DOCS, corpus, tokenizer
from ..specs.model import ModelSpec
from ..specs.model import model as find_model
from ..specs.run import LoRA, Training
from .architectures.llama import Llama
from .experiments.cluster import Place, join, place
from .inference import Request, Scheduler
from .inference.drafts import Bigram
from .quantize import bits_per_weight, file_bytes, nf4
from .quantize.algorithms.rtn import rtn
from .quantize.whole import linears, quantize_model
from .techniques.learning_rate import warmup_cosine
from .techniques.lora import inject, merge, trained_parameters
from .techniques.peft import TARGETS, trained
from .techniques.training_loop import SMALL_LLAMA, batch_seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENGINES = ("torch", "accelerate", "deepspeed")
RECORD = Path(__file__).with_name("capstone.json")  # a run of the toy
CLIP = 1.0  # largest joint norm of all gradients
IGNORED = -100  # the label of a token that has no loss
BLOCKS, BLOCK_SIZE = 256, 16  # of the server's KV cache: in tokens


# ---- 0. The plan: the model, its training, and predictions


ADAPTERS = LoRA(rank=8, targets=TARGETS, dropout=0.05)
LESSONS = Training(micro_batch=8, seq_len=128)
ALONE, CPU = Place(), torch.device("cpu")


@dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    model: dict[str, Any]
    pretraining: Training
    steps: int
    learning_rate: float = 8e-3  # the highest; a larger model needs a lower one
    decay: float = 0.1  # of the weights
    lora: LoRA = ADAPTERS
    tuning: Training = LESSONS
    tuning_steps: int = 80
    tuning_rate: float = 4e-3
    save_every: int = 25  # steps
    windows: int = 64  # of held-out text in an evaluation
    mixes: tuple[str, ...] = ("Q8_0", "Q4_0")
    answers: int = 8  # questions of the transcript
    answer_tokens: int = 48  # at most
    seed: int = 0

    @property
    def spec(self) -> ModelSpec:
        return find_model(self.model)


LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
SMALLEST = {**LLAMA, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}

SCALES = {
    "test": Scale(SMALLEST, Training(2, 32), 60, tuning=Training(2, 64), tuning_steps=20, save_every=5, windows=8,
                  mixes=("Q8_0",), answers=2, answer_tokens=8),
    "toy": Scale(LLAMA, Training(8, 128), 500),
    # The recipe of the book's small Llama, which all chapters use.
    "t4": Scale(SMALL_LLAMA, Training(2, 1024, precision="autocast-fp16"), 500, learning_rate=2e-3, decay=3.0,
                tuning=Training(8, 128, precision="autocast-fp16"), tuning_rate=2e-3, save_every=50, windows=15,
                mixes=("Q8_0", "Q4_K_M")),
}  # fmt: skip


@dataclass
class Session:
    """The folder, the rank, the device and the engine of a run.

    `engine` is one of ENGINES, `settings` is the content of DeepSpeed's config, and `on_step(phase, step, loss)` is
    called after each step.
    """

    folder: Path
    here: Place = ALONE
    device: torch.device = CPU
    engine: str = "torch"
    settings: dict[str, Any] = field(default_factory=dict)
    on_step: Callable[[str, int, float], None] = lambda phase, step, loss: None


def predict(scale: Scale, text_bytes: int, tokens_per_byte: float) -> dict[str, float]:
    """Return by formulas what the run will measure. `tokens_per_byte` is that of a short sample of the text."""
    spec = scale.spec
    matrices = sum(linear.count * linear.inputs * linear.outputs for linear in spec.linears if linear.part != "head")
    adapters = trained("lora", spec, scale.lora.rank)
    return {
        "tokens of the text": text_bytes * tokens_per_byte,
        "bytes of the packed tokens": 2 * text_bytes * tokens_per_byte,
        "parameters": spec.parameters,
        "loss of the first step, nats": math.log(spec.vocab),
        "bytes of the checkpoint": 12 * spec.parameters,  # fp32 weights, and AdamW's two states
        "parameters of LoRA": adapters,
        "bytes of its checkpoint": 12 * adapters,
        **{f"bytes of {mix}": file_bytes(spec, mix) for mix in scale.mixes},
        "bytes of NF4": matrices * bits_per_weight("nf4") / 8 + 4 * (spec.parameters - matrices),
        # keys and values in fp32
        "bytes of the KV cache": 2 * spec.layers * spec.kv_heads * spec.head_dim * 4 * BLOCKS * BLOCK_SIZE,
    }


# ---- 1. Text -> tokenizer -> packed data


class Data(NamedTuple):
    """The text as token ids: `rows`, (rows, S), to train on, and `held_out`, (windows, S), to evaluate on.

    `lessons` and `exam` are (question, answer) pairs. The text that answers the exam may be in `rows`, but the
    questions themselves are not in the text.
    """

    tokenizer: Tokenizer
    rows: Tensor
    held_out: Tensor
    lessons: list[tuple[str, str]]
    exam: list[tuple[str, str]]
    packed_bytes: int


def documents(text: str) -> list[str]:
    """Divide the documentation into its topics, each of which begins with an underlined title."""
    return [part for part in re.split(r"\n\n\n(?=[^\n]+\n[*=]{4,}\n)", text) if part.strip()]


def questions(text: str) -> list[tuple[str, str]]:
    """Return a question and its answer for each function that the text defines.

    >>> questions("len(s)\\n\\n   Return the length (the number of items).  The argument is a list.\\n\\n")
    [('What does len do?', 'Return the length (the number of items).')]
    """
    defined = re.compile(
        r"^( *)(?:class |classmethod |static |async )*([A-Za-z_][\w.]{2,})\([^\n]*\)\n\n((?:\1   \S[^\n]*\n)+)", re.M
    )
    answers: dict[str, str] = {}
    for _, name, description in defined.findall(text):
        first = re.split(r"\.\s", " ".join(description.split()) + " ")[0].rstrip(". ") + "."
        answers.setdefault(f"What does {name} do?", first)
    return [(question, answer) for question, answer in answers.items() if 20 < len(answer) < 200]


def prompt(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def prepare(scale: Scale, session: Session, source: str = PYTHON_DOCS) -> Data:
    """Train the tokenizer, encode the text, and pack it: documents end to end, cut into rows without any padding."""
    text, S, packed = corpus(source), scale.pretraining.seq_len, session.folder / "tokens.bin"
    encoder = tokenizer(scale.spec.vocab, source)
    if session.here.rank == 0 and not packed.exists():
        session.folder.mkdir(parents=True, exist_ok=True)
        with whole(session.folder / "tokenizer.json") as path:
            encoder.save(str(path))
        with whole(packed) as path:  # two bytes per token, because no vocabulary here is larger than 65,536
            np.array(encoder.encode(END_OF_TEXT.join(documents(text))).ids, np.uint16).tofile(path)
    if session.here.ranks > 1:
        dist.barrier()
    ids = np.fromfile(packed, np.uint16)
    held_out = len(ids) // 10
    rows, last = (
        torch.from_numpy(part.astype(np.int64))[: len(part) // S * S].view(-1, S)
        for part in (ids[:-held_out], ids[-held_out:])
    )
    pairs = questions(text) or questions(corpus())
    lessons = [pair for number, pair in enumerate(pairs) if number % 5]
    return Data(encoder, rows, last[: scale.windows], lessons, pairs[::5], ids.nbytes)


def row_numbers(step: int, batch: int, rows: int, seed: int) -> Tensor:
    """Return which rows a step reads, (batch,). All rows are read once per epoch, in a new order in each.

    A step's number is the whole position in the data, so a checkpoint needs no other.
    """
    numbers = torch.arange(step * batch, (step + 1) * batch)
    chosen = torch.empty_like(numbers)
    for epoch in (numbers // rows).unique().tolist():
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(batch_seed(seed, epoch)))
        here = numbers // rows == epoch
        chosen[here] = order[numbers[here] % rows]
    return chosen


def padded(encoder: Tokenizer, pairs: Sequence[tuple[str, str]], longest: int) -> tuple[Tensor, Tensor]:
    """Return (ids, labels), (pairs, S) each. Only the answer and the end of the text have a loss."""
    ids, labels = [], []
    for question, answer in pairs:
        before, after = (encoder.encode(part).ids for part in (prompt(question), f" {answer}{END_OF_TEXT}"))
        ids.append(torch.tensor((before + after)[:longest]))
        labels.append(torch.tensor(([IGNORED] * len(before) + after)[:longest]))
    pad = nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=IGNORED)


def label_loss(logits_BSV: Tensor, labels_BS: Tensor, count: float) -> Tensor:
    """Return the sum of the losses of all labels that are not ignored, divided by `count`, in nats."""
    predicted, answers = logits_BSV[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten()
    return F.cross_entropy(predicted.float(), answers, ignore_index=IGNORED, reduction="sum") / count


def scored(labels_BS: Tensor) -> int:
    """Return how many labels have a loss. The first label of a row has none, because no token precedes it."""
    return int((labels_BS[:, 1:] != IGNORED).sum())


# ---- 2. A checkpoint that a kill cannot break


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and rename it to `path` afterwards. So `path` is never an incomplete file.

    The rename is atomic. Without fsync, a power cut could leave the new name on a file whose bytes never arrived.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


@dataclass
class Progress:
    """Everything that the next step of a phase depends on. The position in the data is the number of losses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    generator: torch.Generator  # dropout draws from it
    losses: list[float] = field(default_factory=list)

    def save(self, path: Path, here: Place) -> None:
        generators = [self.generator.get_state()] * here.ranks
        if here.ranks > 1:
            dist.all_gather_object(generators, self.generator.get_state())
        if here.rank == 0:
            state = {
                "weights": {name: w.detach() for name, w in self.model.named_parameters() if w.requires_grad},
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "generators": generators,
                "losses": self.losses,
            }
            with whole(path) as unfinished:
                torch.save(state, unfinished)

    def resume(self, path: Path, here: Place) -> None:
        """Load a checkpoint if there is one. `weights_only` refuses files that would run code."""
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in state["weights"].items():
                parameters[name].copy_(weight)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["generators"]) == here.ranks:
            self.generator.set_state(state["generators"][here.rank])
        self.losses = state["losses"]


# ---- 3. Training: one loop for pretraining and for LoRA, on one process or many


class Engine(NamedTuple):
    """The model, wrapped by a library for the forward pass, and the library's backward pass and update."""

    model: nn.Module
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]


def start_engine(name: str, progress: Progress, here: Place, settings: dict[str, Any]) -> Engine:
    """Return the engine `name`: torch alone or with DDP, Accelerate, or DeepSpeed with the `settings` of a plan."""
    model, optimizer, scaler = progress.model, progress.optimizer, progress.scaler
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if name == "accelerate":
        from accelerate import Accelerator

        # Without `cpu`, an Accelerator silently trains each rank alone if the ranks have no GPU.
        accelerator = Accelerator(cpu=weights[0].device.type == "cpu")
        wrapped_model, wrapped_optimizer = accelerator.prepare(model, optimizer)

        def update() -> None:
            accelerator.clip_grad_norm_(weights, CLIP)
            wrapped_optimizer.step()
            wrapped_optimizer.zero_grad()

        return Engine(wrapped_model, accelerator.backward, update)
    if name == "deepspeed":
        from .experiments.engines import quiet_deepspeed

        if next(model.parameters()).device.type == "cpu":
            quiet_deepspeed()
        import deepspeed

        if settings.get("zero_optimization", {}).get("stage", 0):
            raise SpecError("this script saves whole states, and ZeRO divides them: plan with fixed={'zero': 0}")
        config = {**settings, "gradient_clipping": CLIP}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return Engine(engine, engine.backward, engine.step)

    def clip_and_step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    wrapped = nn.parallel.DistributedDataParallel(model) if here.ranks > 1 else model
    return Engine(wrapped, lambda loss: scaler.scale(loss).backward(), clip_and_step)


def train(
    phase: str,
    model: nn.Module,
    run: Training,
    steps: int,
    rate: float,
    scale: Scale,
    session: Session,
    batch: Callable[[int], tuple[Tensor, Tensor]],
) -> Progress:
    """Train until `steps` steps are done, starting from the last checkpoint of this phase; return the progress.

    `batch(step)` returns the ids and the labels of the whole step, (B, S) each. Each rank trains on its share of them.
    """
    here, device = session.here, session.device
    model.to(device).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    decay = 0.0 if phase == "tune" else scale.decay
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    half = {"autocast-fp16": torch.float16, "autocast-bf16": torch.bfloat16}.get(run.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16 and session.engine == "torch")
    on_gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index or 0] if on_gpu else torch.default_generator
    generator.manual_seed(batch_seed(scale.seed, here.rank))
    progress = Progress(model, optimizer, scaler, generator)
    path = session.folder / f"{phase}.checkpoint"
    progress.resume(path, here)
    if len(progress.losses) >= steps:
        return progress
    engine = start_engine(session.engine, progress, here, session.settings)
    autocast = torch.autocast(device.type, half) if half and session.engine == "torch" else nullcontext()
    for step in range(len(progress.losses), steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * warmup_cosine(step + 1, steps // 10, steps, 0.1)
        whole_batch = batch(step)
        count = scored(whole_batch[1]) / here.ranks  # engines average over ranks, which may have unequal shares
        ids_BS, labels_BS = (part[here.rank :: here.ranks].to(device) for part in whole_batch)
        with autocast:
            loss = label_loss(engine.model(ids_BS), labels_BS, count)
        engine.backward(loss)
        engine.update()
        mean = loss.detach().float() / here.ranks
        if here.ranks > 1:
            dist.all_reduce(mean)
        progress.losses.append(mean.item())
        session.on_step(phase, step + 1, progress.losses[-1])
        if (step + 1) % scale.save_every == 0 or step + 1 == steps:
            progress.save(path, here)
    return progress


def pretrain(scale: Scale, data: Data, session: Session) -> Progress:
    """Train a Llama from random weights to predict the next token."""
    torch.manual_seed(scale.seed)
    model, run = Llama.from_spec(scale.model), scale.pretraining

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids_BS = data.rows[row_numbers(step, run.micro_batch, len(data.rows), scale.seed)]
        return ids_BS, ids_BS

    arguments = (run, scale.steps, scale.learning_rate, scale, session, batch)
    return train("pretrain", model, *arguments)


def tune(scale: Scale, data: Data, session: Session, pretrained: Llama) -> Progress:
    """Teach a copy of the pretrained model to answer a question and then to stop, with LoRA."""
    torch.manual_seed(scale.seed + 1)
    model = inject(copy_of(pretrained), scale.lora)
    run = scale.tuning

    def batch(step: int) -> tuple[Tensor, Tensor]:
        chosen = row_numbers(step, run.micro_batch, len(data.lessons), scale.seed)
        return padded(data.tokenizer, [data.lessons[i] for i in chosen.tolist()], run.seq_len)

    arguments = (run, scale.tuning_steps, scale.tuning_rate, scale, session, batch)
    return train("tune", model, *arguments)


def copy_of(model: Llama) -> Llama:
    copied = Llama(model.spec)
    copied.load_state_dict(model.state_dict())
    return copied


def merged(tuned: nn.Module, spec: ModelSpec) -> Llama:
    """Return a plain Llama with the adapters added to the weights."""
    merge(tuned)
    plain = Llama(spec)
    state = {name.replace(".base.", "."): w for name, w in tuned.state_dict().items() if name[-2:] not in (".A", ".B")}
    plain.load_state_dict(state)
    return plain.eval()


# ---- 4. Evaluation: all models read the same windows, and are compared in pairs


@torch.no_grad()
def window_losses(model: nn.Module, windows_BS: Tensor) -> Tensor:
    """Return the mean loss of each window, (B,), in nats per token."""
    logits_BSV = model(windows_BS)
    losses = F.cross_entropy(logits_BSV[:, :-1].transpose(1, 2).float(), windows_BS[:, 1:], reduction="none")
    return losses.mean(1)


@torch.no_grad()
def answer_losses(model: nn.Module, encoder: Tokenizer, exam: Sequence[tuple[str, str]], longest: int) -> Tensor:
    """Return the mean loss of each right answer, (questions,), in nats per token."""
    losses = []
    for pair in exam:
        ids_1S, labels_1S = padded(encoder, [pair], longest)
        losses.append(label_loss(model(ids_1S), labels_1S, scored(labels_1S)))
    return torch.stack(losses)


def compare(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """Return by how much `losses` are higher on average, and the standard error of this difference.

    Both models have read the same windows, so only the differences count: what makes a window hard is in both.
    """
    differences = (losses - others).double()
    return differences.mean().item(), (differences.std() / math.sqrt(len(differences))).item()


def bits_per_byte(losses: Tensor, windows_BS: Tensor, encoder: Tokenizer) -> float:
    nats = losses.sum().item() * (windows_BS.shape[1] - 1)
    return nats / math.log(2) / sum(len(encoder.decode(row[1:].tolist()).encode()) for row in windows_BS)


# ---- 5. Quantization: GGUF files for llama.cpp, and NF4


def to_nf4(weight: Tensor, inputs: Tensor | None = None) -> Tensor:
    """Return the weights that NF4 restores: 4 bits each, and an fp32 scale for 64 of them."""
    return nf4.decode(*nf4.encode(weight), weight.shape)


def to_two_bits(weight: Tensor, inputs: Tensor | None = None) -> Tensor:
    """Return the weights rounded to four values per group of 32, which are so few that an evaluation must notice."""
    return rtn(weight, bits=2, group=32).dequantize()


def write_nf4(path: Path, model: Llama) -> None:
    """Write codes and scales of the linear layers, and all other weights in fp32."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    quantized = {f"{name}.weight" for name in linears(model)}
    for name, weight in model.named_parameters():
        if name in quantized:
            tensors[f"{name}.codes"], tensors[f"{name}.scales"] = nf4.encode(weight.detach())
        else:
            tensors[name] = weight.detach().clone()
    save_file(tensors, path)


def quantize(scale: Scale, data: Data, model: Llama, folder: Path) -> dict[str, Llama]:
    """Write the model in each format, and return the models that these formats restore."""
    from .quantize.formats.gguf_model import read_llama, write_llama

    found = {}
    for mix in scale.mixes:
        with whole(folder / f"model-{mix}.gguf") as path:
            write_llama(path, model, data.tokenizer, mix)
        found[mix] = read_llama(folder / f"model-{mix}.gguf")
    with whole(folder / "model-NF4.safetensors") as path:
        write_nf4(path, model)
    found["NF4"] = quantize_model(model, to_nf4)
    return found


# ---- 6. Serving: this book's scheduler, and llama.cpp


BEGINNINGS = ("The with statement is used to", "If the class", "When a function is called,")


class Served(NamedTuple):
    """Requests that have been answered, and the size of the KV cache that they shared."""

    requests: list[Request]
    cache_bytes: int


def serve(model: nn.Module, encoder: Tokenizer, prompts: Sequence[str], new: int, **sampling: Any) -> Served:
    """Answer all prompts together by continuous batching, up to the end of the text; by default greedily."""
    scheduler = Scheduler(model, BLOCKS, BLOCK_SIZE)
    stop = encoder.token_to_id(END_OF_TEXT)
    requests = [scheduler.submit(encoder.encode(text).ids, new, stop=stop, **sampling) for text in prompts]
    scheduler.run()
    return Served(requests, sum(pages.nbytes for layer in scheduler.cache.layers for pages in layer))


def answer_of(request: Request, encoder: Tokenizer) -> str:
    return encoder.decode(request.output).strip()


def llama_cpp_tokens(path: Path, encoder: Tokenizer, prompts: Sequence[str], new: int) -> list[list[int]]:
    """Return what llama.cpp generates from the file `path`; NotAvailable where it is not installed."""
    try:
        from llama_cpp import Llama as LlamaCpp
    except ImportError:
        raise NotAvailable("llama.cpp is not installed: pip install llama-cpp-python") from None
    engine = LlamaCpp(str(path), n_ctx=256, n_threads=1, verbose=False)
    stop, answers = encoder.token_to_id(END_OF_TEXT), []
    for text in prompts:
        tokens: list[int] = []
        for token in engine.generate(encoder.encode(text).ids, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if token == stop or len(tokens) == new:
                break
        answers.append(tokens)
    engine.close()
    return answers


# ---- 7. The whole run


def run(scale: Scale, session: Session, source: str = PYTHON_DOCS) -> dict[str, Any]:
    """Run all parts in `session.folder`. Return the predictions and the measurements on rank 0, {} on all others."""
    folder, clock = session.folder, Clock()
    text = corpus(source)
    sample = text[: len(text) // 20]
    encoder = tokenizer(scale.spec.vocab, source)
    predicted = predict(scale, len(text.encode()), len(encoder.encode(sample).ids) / len(sample.encode()))

    data = prepare(scale, session, source)
    clock("tokens")
    pretraining = pretrain(scale, data, session)
    pretrained = copy_of(pretraining.model.cpu()).eval()  # type: ignore[arg-type]
    clock("pretraining")
    tuning = tune(scale, data, session, pretrained)
    adapters = trained_parameters(tuning.model)
    tuned = merged(tuning.model.cpu(), scale.spec)
    clock("LoRA")
    if session.here.rank:
        return {}

    formats = quantize(scale, data, tuned, folder)
    clock("quantization")
    models = {"pairs of tokens": Bigram(data.rows.flatten(), scale.spec), "pretrained": pretrained, "tuned": tuned,
              **formats, "2 bits": quantize_model(tuned, to_two_bits)}  # fmt: skip
    losses = {name: window_losses(model, data.held_out) for name, model in models.items()}
    exam = {name: answer_losses(model, data.tokenizer, data.exam, scale.tuning.seq_len)
            for name, model in models.items()}  # fmt: skip
    clock("evaluation")
    transcripts, cache_bytes = answer_exam(scale, data, models, folder, clock)
    measured = {
        "tokens of the text": data.packed_bytes // 2,
        "bytes of the packed tokens": (folder / "tokens.bin").stat().st_size,
        "parameters": sum(weight.numel() for weight in pretrained.parameters()),
        "loss of the first step, nats": pretraining.losses[0],
        "bytes of the checkpoint": (folder / "pretrain.checkpoint").stat().st_size,
        "parameters of LoRA": adapters,
        "bytes of its checkpoint": (folder / "tune.checkpoint").stat().st_size,
        **{f"bytes of {mix}": (folder / f"model-{mix}.gguf").stat().st_size for mix in scale.mixes},
        "bytes of NF4": (folder / "model-NF4.safetensors").stat().st_size,
        "bytes of the KV cache": cache_bytes,
    }
    report = {
        "predicted": predicted,
        "measured": measured,
        "losses": {"pretrain": pretraining.losses, "tune": tuning.losses},
        "windows": {name: values.tolist() for name, values in losses.items()},
        "bits per byte": {name: bits_per_byte(values, data.held_out, encoder) for name, values in losses.items()},
        "exam": {name: values.tolist() for name, values in exam.items()},
        **transcripts,
    }
    with whole(folder / "report.json") as path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return {**report, "core seconds": clock.seconds}


def answer_exam(
    scale: Scale, data: Data, models: dict[str, nn.Module], folder: Path, clock: Clock
) -> tuple[dict[str, Any], int]:
    """Answer questions of the exam by the pretrained model and by the first GGUF file; return the answers, and the
    bytes of the KV cache. The clock does not count llama.cpp."""
    encoder, mix = data.tokenizer, scale.mixes[0]
    pairs = data.exam[:: max(1, len(data.exam) // scale.answers)][: scale.answers]
    prompts = [prompt(question) for question, _ in pairs]
    served = {name: serve(models[name], encoder, prompts, scale.answer_tokens) for name in ("pretrained", mix)}
    sampled = serve(models["pretrained"], encoder, BEGINNINGS, scale.answer_tokens, temperature=0.5, top_p=0.9,
                    seed=scale.seed)  # fmt: skip
    clock("serving")
    try:
        by_llama_cpp = llama_cpp_tokens(folder / f"model-{mix}.gguf", encoder, prompts, scale.answer_tokens)
    except NotAvailable:
        by_llama_cpp = []
    stop = encoder.token_to_id(END_OF_TEXT)
    return {
        "ended": {name: sum(r.output[-1] == stop for r in answers.requests) for name, answers in served.items()},
        "llama.cpp": [
            tokens == request.output  # an empty list without llama.cpp
            for tokens, request in zip(by_llama_cpp, served[mix].requests, strict=False)
        ],
        "continuations": [encoder.decode(request.prompt + request.output) for request in sampled.requests],
        "transcript": [
            {"question": question, "expected": answer,
             **{name: answer_of(answers.requests[i], encoder) for name, answers in served.items()}}
            for i, (question, answer) in enumerate(pairs)
        ],
    }, served["pretrained"].cache_bytes  # fmt: skip


class Clock:
    """Seconds that each part of the run kept the cores busy, summed over the cores."""

    def __init__(self) -> None:
        self.last, self.seconds = time.process_time(), dict[str, float]()

    def __call__(self, part: str) -> None:
        time_used = time.process_time()
        self.seconds[part], self.last = round(time_used - self.last, 1), time_used


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of checkpoints and results")
    parser.add_argument("--scale", choices=SCALES, default="toy")
    parser.add_argument("--engine", choices=ENGINES, default="torch")
    parser.add_argument("--settings", type=Path, help="ds_config.json of a plan, for --engine deepspeed")
    parser.add_argument("--record", type=Path, metavar="FILE", help="where everything is written, with the times")
    parser.add_argument("--local_rank", "--local-rank", help="from the deepspeed launcher; LOCAL_RANK says it too")
    options = parser.parse_args(arguments)
    here = place()
    device = join(here) if here.ranks > 1 else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = json.loads(options.settings.read_text(encoding="utf-8")) if options.settings else {}
    session = Session(options.out, here, device, options.engine, settings, report_step if here.rank == 0 else no_report)
    report = run(SCALES[options.scale], session)
    if here.ranks > 1:
        dist.destroy_process_group()
    if report and options.record:
        options.record.write_text(json.dumps(rounded(report), indent=1) + "\n", encoding="utf-8")
    if report:
        for name, expected in report["predicted"].items():
            measured = report["measured"].get(name)
            print(f"{name:34} predicted {expected:14,.2f}" + (f"   measured {measured:14,.2f}" if measured else ""))
        for row in report["transcript"]:
            print(f"\n{row['question']}\n  {list(row.values())[-1]}")


def rounded(value: Any) -> Any:
    """Return the value with all floats rounded to five digits."""
    if isinstance(value, dict):
        return {name: rounded(element) for name, element in value.items()}
    if isinstance(value, list):
        return [rounded(element) for element in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def report_step(phase: str, step: int, loss: float) -> None:
    if step % 25 == 0 or step == 1:
        print(f"{phase} step {step}: {loss:.3f} nats", flush=True)


def no_report(phase: str, step: int, loss: float) -> None:
    """The other ranks print nothing."""


if __name__ == "__main__":
    main()
