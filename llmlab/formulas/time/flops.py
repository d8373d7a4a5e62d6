"""FLOP of a step: where 2ND, 6ND and 8ND come from, and what they omit.

Like PyTorch's FlopCounterMode, this counts matmuls and attention, with a multiply and an add as two. It does not count
norms, activation functions, softmax, the optimizer's element-wise arithmetic, or embedding lookups. Causal attention
counts as if nothing were masked. Matmuls that FlopCounterMode does not know, because they are new or no operators of
PyTorch, count like any other: bitsandbytes' matmuls with packed weights, and the grouped ones of experts.

    B  sequences     T  tokens per sequence     S  tokens it sees     r  LoRA's rank
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Inference, Run, Training
from .. import newton_schulz
from ..again import attentions_again
from ..memory.methods import other_models, value_run
from ..memory.share import attention_kernel
from ..memory.states import adapter_parameters
from .products import gradients_of_first_block, products


@dataclass
class Flops:
    """FLOP of a step by place. `recomputed` is the FLOP that checkpointing adds. `by_part` divides the sum of forward,
    backward and recomputation into "attention" (its linear layers), "scores" (matmuls without weights), "mlp",
    "experts", "router", "head", "adapters"."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    scores_again: int = 0  # part of `backward`: q·kᵀ, which fused attention recomputes
    optimizer: int = 0  # Adafactor multiplies its factors, Muon orthogonalizes
    by_part: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, forward: int, backward: int = 0, recomputed: int = 0) -> None:
        """Add the matmuls of a part."""
        self.forward += forward
        self.backward += backward
        self.recomputed += recomputed
        if total := forward + backward + recomputed:
            self.by_part[part] = self.by_part.get(part, 0) + total

    @property
    def total(self) -> int:
        """Everything that is computed: the FLOP of HFU."""
        return self.forward + self.backward + self.recomputed + self.optimizer

    @property
    def model(self) -> int:
        """The FLOP that the model needs without recomputation: 6N + 12LhS per token (MFU: PaLM, arXiv 2204.02311,
        appendix B)."""
        return self.forward + self.backward - self.scores_again


def flops(spec: ModelSpec, run: Run, gpu: GPU | None = None, cpu: bool = False) -> Flops:
    """Return the FLOP of one step of `run` on all devices together: the count of FlopCounterMode on the real model.

    A training step consists of all its micro-batches. A generation consists of its prefill and all decoded tokens
    except the last, which goes through no model. `gpu` (or `cpu`) determines the attention kernel, and therefore
    whether the backward pass recomputes the scores: 5 matmuls instead of 4.
    """
    return _counted(spec, run, "" if isinstance(run, Inference) else attention_kernel(spec, run, gpu, cpu))


@lru_cache(maxsize=1024)
def _counted(spec: ModelSpec, run: Run, kernel: str) -> Flops:
    if isinstance(run, Inference):
        return _generation(spec, run)
    updates = {
        "adafactor": lambda: 2 * _factored(spec, run),
        "muon": lambda: run.dp * run.cp * newton_schulz.flop(spec),
    }
    sums = Flops(optimizer=updates[run.optimizer]() if run.optimizer in updates else 0)
    tokens = run.global_batch * run.seq_len
    heads = run.scored * run.accumulation * run.dp
    for matmul in products(spec, run):
        sums.add(matmul.part, *matmul.flops(heads if matmul.part == "head" else tokens))
    _scores(sums, spec, run, run.global_batch, kernel)
    return sums


def approximate(parameters: int, tokens: int, recomputation: bool = False) -> int:
    """Return 6ND, or 8ND with full recomputation. Per weight and token, the forward pass computes 2 FLOP, the backward
    pass 4 (2 for the gradient of the input, 2 for that of the weight), and recomputation 2 more (Kaplan et al., 2020,
    arXiv 2001.08361, section 2.1).

    >>> f"{approximate(82 * 10**9, 150 * 10**9):.3g}"
    '7.38e+22'
    """
    return (8 if recomputation else 6) * parameters * tokens


def chinchilla_tokens(parameters: int) -> int:
    """Return 20N: the number of tokens on which to train N parameters if only training costs matter (arXiv 2203.15556,
    table 3)."""
    return 20 * parameters


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Return L(N, D) = E + A/Nᵅ + B/Dᵝ in nats per token: the loss of N parameters after D tokens, each read once.

    The form is arXiv 2203.15556's, equation 2, fitted to 70M to 16B parameters on 5 to 500 billion tokens. The
    constants are those that arXiv 2404.10102, section 3, fitted again to the same data. Another text or tokenizer has
    another loss.

    >>> round(chinchilla_loss(70e9, 1.4e12), 2)
    1.97
    """
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def _scores(sums: Flops, spec: ModelSpec, run: Training, sequences: int, kernel: str) -> None:
    """Add q·kᵀ and scores·v. Fused kernels save no scores and compute q·kᵀ again in the backward pass."""
    qk, v = head_sizes(spec)
    one = 2 * sequences * spec.heads * run.seq_len * run.seq_len
    forward = spec.layers * one * (qk + v)
    backward, forward_once = 2 * forward, forward
    first = gradients_of_first_block(spec, run)
    q_, k_, v_ = (first.get(f"scores {name}", True) for name in "qkv") if first else (True, True, True)
    if kernel in ("flash", "efficient"):
        sums.scores_again = (spec.layers - (not (q_ or k_ or v_))) * one * qk
        backward += sums.scores_again
        if not (q_ or k_ or v_):
            backward -= one * (2 * qk + 2 * v)
    else:  # each of the four matmuls only if its result is needed
        backward -= one * ((not q_) * qk + (not k_) * qk + (not v_) * v + (not (q_ or k_)) * v)
    again = attentions_again(spec, run, kernel in ("flash", "efficient"))
    forward += sum(other.passes * other.spec.layers * 2 * sequences * other.spec.heads * run.seq_len**2
                   * sum(head_sizes(other.spec)) for other in other_models(spec, run))  # fmt: skip
    sums.add("scores", forward, backward, forward_once * again // spec.layers)
    if run.objective.critic:
        _scores(sums, spec, value_run(run), sequences, kernel)


def head_sizes(spec: ModelSpec, absorbed: bool = False) -> tuple[int, int]:
    """Return the number of elements of a query (or key) head and of a value head. `absorbed`: see `token_pass`."""
    if spec.mla and absorbed:
        return spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim, spec.mla.kv_lora_rank
    return spec.head_dim, spec.mla.v_head_dim if spec.mla else spec.head_dim


def _factored(spec: ModelSpec, run: Training) -> int:
    """Return the number of elements of all matrices for which Adafactor computes second moments as a row times a
    column."""
    if run.lora:
        return adapter_parameters(spec, run)
    by = spec.parameters_by_component
    vectors = by["norms"] + sum(linear.count * linear.outputs for linear in spec.linears if linear.bias)
    return spec.parameters - vectors


def _generation(spec: ModelSpec, run: Inference) -> Flops:
    """Return the FLOP of the prompt's pass and of one pass for each new token except the last. The head sees one
    position of each sequence."""
    sums = Flops()
    _passes(sums, spec, run.batch, run.prompt_len, range(run.prompt_len, run.prompt_len + 1))
    _passes(sums, spec, run.batch, 1, range(run.prompt_len + 1, run.prompt_len + run.new_tokens))
    return sums


def token_pass(spec: ModelSpec, batch: int, context: int, absorbed: bool = True) -> dict[str, int]:
    """Return the FLOP, by part, of a pass that reads one token of each of `batch` sequences and attends to `context`
    tokens.

    With latent attention, engines absorb the up-projections (DeepSeek-V2, arXiv 2405.04434, section 2.1): qᵀ(W_k c) is
    (W_kᵀq)ᵀc. They project each query into the latent space, and each sum of latents back to a head's values, once per
    token with kv_b_proj's weights; all heads compute scores and sums over latents. With `absorbed` False, as in
    transformers, every pass computes the keys and values of all heads from all latents in the cache again.
    """
    sums = Flops()
    _passes(sums, spec, batch, 1, range(context, context + 1), absorbed)
    return sums.by_part


def _passes(sums: Flops, spec: ModelSpec, batch: int, new: int, seen: range, absorbed: bool = False) -> None:
    """Add forward passes of `new` tokens per sequence, one for each element of `seen`: the number of tokens that they
    attend to, including themselves."""
    for linear in spec.linears:
        tokens = batch * len(seen) * (1 if linear.part == "head" else new)
        if linear.name == "kv_b_proj" and not absorbed:  # the cache holds latents, expanded again in each pass
            tokens = batch * sum(seen)
        sums.add(linear.part, 2 * tokens * linear.inputs * linear.outputs * linear.count)
    if spec.experts:
        tokens = batch * len(seen) * new * spec.moe_layers
        sums.add("router", 2 * tokens * spec.hidden * spec.experts)
        sums.add("experts", 2 * tokens * spec.experts_per_token * 3 * spec.hidden * spec.moe_intermediate)
    qk, v = head_sizes(spec, absorbed)
    positions = (spec.layers - spec.window_layers) * sum(seen)
    if spec.sliding_window:
        widest = max(new, spec.sliding_window)
        within = range(seen.start, min(seen.stop, widest + 1))
        positions += spec.window_layers * (sum(within) + widest * (len(seen) - len(within)))
    else:
        positions += spec.window_layers * sum(seen)
    sums.add("scores", 2 * batch * spec.heads * new * positions * (qk + v))
