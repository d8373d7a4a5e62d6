"""What a KV cache saves: the book's small model writes a text of 512 tokens, without a cache and with each kind.

    python -m benchmarks.agreement.decoding                           # prints the table
    python -m benchmarks.agreement.decoding --out benchmarks/results  # and writes decoding.md

The kinds are timed one after the other in one process. Without a GPU it uses one thread and counts CPU seconds, so that
other work on the machine does not matter. The exit code is 1 if a kind writes other tokens, or if a preallocated cache
is not 3 times as fast as none.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import llmlab as lab
from benchmarks.provenance import provenance, table, write
from llmlab.course.architectures.small import small_ids, small_model
from llmlab.course.inference import generate
from llmlab.course.inference.generate import CACHES

LENGTH, BAR = 512, 3.0
HEADER = ["cache", "seconds", "ms per token", "speedup over no cache"]


def timed(model: torch.nn.Module, prompt: torch.Tensor, new: int, kind: str) -> tuple[float, list[int]]:
    """Return the seconds that `new` tokens take, and the text."""
    clock = time.perf_counter if prompt.is_cuda else time.process_time
    generate(model, prompt, 2, cache=kind)
    start = clock()
    text = generate(model, prompt, new, cache=kind).tolist()
    return clock() - start, text


def measure(prompt_tokens: int) -> tuple[list[list[str]], float, bool]:
    """Return the rows, the speedup of the preallocated cache over none, and whether all texts agree."""
    device = lab.scale().device
    if device == "cpu":
        torch.set_num_threads(1)
    model, prompt = small_model().to(device), small_ids()[1][:prompt_tokens].to(device)
    new = LENGTH - prompt_tokens
    found = {kind: timed(model, prompt, new, kind) for kind in CACHES}
    none, text = found["none"]
    rows = [
        [kind, f"{seconds:.2f}", f"{1e3 * seconds / new:.2f}", f"{none / seconds:.1f}"]
        for kind, (seconds, _) in found.items()
    ]
    return rows, none / found["static"][0], all(other == text for _, other in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=16, help="tokens given; the rest up to 512 is written")
    parser.add_argument("--out", type=Path, help="folder for decoding.md")
    given = parser.parse_args()
    rows, ratio, same = measure(given.prompt)
    lines = table(HEADER, rows)
    texts = "All rows generated the same text." if same else "The rows generated different texts."
    summary = f"{LENGTH - given.prompt} tokens after a prompt of {given.prompt}. {texts}"
    text = "\n".join([*lines, "", f"{summary} {provenance('llmlab', 'torch')}"])
    print(text)
    if given.out:
        write(given.out / "decoding.md", text)
    return 0 if same and ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
