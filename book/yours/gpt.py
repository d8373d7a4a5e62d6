"""Your GPT."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def attention_weights(q_BaSd, k_BaSd):
    S, d = q_BaSd.shape[2:]
    scores_BaSS = q_BaSd @ k_BaSd.transpose(2, 3) / math.sqrt(d)
    later = torch.ones(S, S, dtype=torch.bool, device=q_BaSd.device).triu(1)
    return scores_BaSS.masked_fill(later, -math.inf).softmax(dim=-1)


def attend(q_BaSd, k_BaSd, v_BaSd):
    return attention_weights(q_BaSd, k_BaSd) @ v_BaSd


class Attention(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.a, self.attend = a, attend
        self.c_attn = nn.Linear(h, 3 * h)  # q, k and v in one matmul
        self.c_proj = nn.Linear(h, h)

    def forward(self, x_BSh):
        B, S, h = x_BSh.shape
        qkv = self.c_attn(x_BSh).split(h, dim=2)
        q_BaSd, k_BaSd, v_BaSd = (t.view(B, S, self.a, -1).transpose(1, 2) for t in qkv)
        o_BaSd = self.attend(q_BaSd, k_BaSd, v_BaSd)
        return self.c_proj(o_BaSd.transpose(1, 2).reshape(B, S, h))


class MLP(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.c_fc = nn.Linear(h, 4 * h)
        self.c_proj = nn.Linear(4 * h, h)

    def forward(self, x_BSh):
        return self.c_proj(F.gelu(self.c_fc(x_BSh), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, h, a):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(h), Attention(h, a)
        self.ln_2, self.mlp = nn.LayerNorm(h), MLP(h)

    def forward(self, x_BSh):
        x_BSh = x_BSh + self.attn(self.ln_1(x_BSh))
        return x_BSh + self.mlp(self.ln_2(x_BSh))


class GPT(nn.Module):
    def __init__(self, V, h, L, a, positions):
        super().__init__()
        self.wte = nn.Embedding(V, h)  # the names are those of transformers' GPT-2
        self.wpe = nn.Embedding(positions, h)
        self.h = nn.ModuleList(Block(h, a) for _ in range(L))
        self.ln_f = nn.LayerNorm(h)
        self.lm_head = nn.Linear(h, V, bias=False)
        self.lm_head.weight = self.wte.weight  # tied

    def forward(self, ids_BS):
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        x_BSh = self.wte(ids_BS) + self.wpe(positions_S)
        for block in self.h:
            x_BSh = block(x_BSh)
        return self.lm_head(self.ln_f(x_BSh))  # logits, (B, S, V)


def initialize(model, std=0.05):
    branches = 2 * len(model.h)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            ends_a_branch = name.endswith("c_proj.weight")
            nn.init.normal_(parameter, std=std / math.sqrt(branches) if ends_a_branch else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


@torch.no_grad()
def generate(model, ids, count, temperature=1.0, top_k=None, seed=0):
    device, context = next(model.parameters()).device, model.wpe.num_embeddings
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.tensor([ids], device=device)
    for _ in range(count):
        logits = model(ids[:, -context:])[0, -1] / temperature
        if top_k:
            smallest = logits.topk(top_k).values[-1]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        new = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        ids = torch.cat((ids, new[None]), dim=1)
    return ids[0].tolist()


# ---- chapter 1


def leaks(model, ids):
    raise NotImplementedError


def rope(x, positions, speeds):
    raise NotImplementedError


class Llama(nn.Module):
    """A GPT with RMSNorm, RoPE, SwiGLU of width f and k key/value heads: README.md says how its parts are called."""

    def __init__(self, V, h, L, a, k, f):
        raise NotImplementedError
