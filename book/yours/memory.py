"""Bytes: your predictions for Llama-3.2-1B, and your readings of models and of the allocator."""

# Llama-3.2-1B
L, h, f, V = 16, 2_048, 8_192, 128_256
a, k, d = 32, 8, 64
attention = 2 * h * a * d + 2 * h * k * d
N = V * h + L * (attention + 3 * h * f + 2 * h) + h


def block_bytes(B, S, h, f, a):
    """Bytes that a Llama block saves in fp32 with eager attention."""
    T = B * S
    return 4 * (10 * T * h + 4 * T * f + B * a * S**2)


# ---- chapter 2


def states(model):
    raise NotImplementedError  # return {"weights": bytes, "gradients": bytes}


def peak_bytes(B, S):
    raise NotImplementedError  # use N, L, h, f, a, V and block_bytes


# ---- chapter 3


def largest_request(segments):
    raise NotImplementedError


def allocated_at_end(events):
    raise NotImplementedError
