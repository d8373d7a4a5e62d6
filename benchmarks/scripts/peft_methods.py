"""PEFT's comparison of methods: its own script under `llmlab run`, for each of its published results.

    python -m benchmarks.scripts.peft_methods --clone DIR --work DIR --out benchmarks/results   # writes peft_methods.md

DIR of --clone holds huggingface/peft at commit 5d602fdbf. method_comparison/MetaMathQA/run.py fine-tunes Llama-3.2-3B
in bf16 with 4 sequences per step for 5,000 steps, on an L40S, and its results have the largest reserved memory, and the
allocated memory after a step, averaged over the first 250. No line of the script is changed. Its settings, which are a
file, are 11 steps here, and one generated token in the evaluations.

The data set and the tokenizer are not there. The script sorts each 20 batches, the longest first, and empties the
allocator's cache after every tenth step, so the longest batch comes directly after that. The stand-in has one batch of
LONGEST tokens, padded, and nine of SHORT tokens. Step 11 begins again with the longest. LONGEST is the one number that
is chosen: with it, LoRA of rank 32 reserves what was published, and all other rows follow. After a step, the logits of
the last batch are still allocated, so its length matters there as well: the table has the difference between a method
and LoRA of rank 32, in which the length cancels out.

All but two of the results were made with PEFT's commit d787f51: LoKr's with 505e6fd, and the second of adaption prompt
with 194cb8f. With --code, a checkout of d787f51, its package and script run in place of the installed package, for
NAMES or the methods that are not in --work; the table marks these rows.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.provenance import provenance, titled_table, write
from llmlab.base.units import GiB, MiB

LONGEST = 695  # tokens
SHORT = 100  # tokens
STEPS = 11
TEMPLATE = 37  # tokens of the script's prompt
REFERENCE = "lora--llama-3.2-3B-rank32"
MODEL = "meta-llama/Llama-3.2-3B"
REVISION = "0" * 40
LIMIT = 1800  # seconds for one method
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16", "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


def stand_ins(work: Path) -> dict[str, Path]:
    """Make the model's config, a tokenizer with a token per character, and rows; return the rows' files by name."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"[UNK]": 0, **{letter: 1 + number for number, letter in enumerate(string.printable)},
           **{f"unused{number}": 1000 + number for number in range(256)},
           "<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    entry = work / "huggingface" / "hub" / f"models--{MODEL.replace('/', '--')}"
    folder = entry / "snapshots" / REVISION
    folder.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text(REVISION)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=131072, **named).save_pretrained(folder)

    chance = random.Random(0)

    def text(length: int) -> str:
        return "".join(chance.choice("abc") for _ in range(length))

    lengths = [(LONGEST if number < 4 else SHORT) - 4 * (number % 2) - TEMPLATE for number in range(4 * (STEPS - 1))]
    rows: dict[str, list[dict[str, str]]] = {
        "meta-math/MetaMathQA": [
            {"type": "GSM", "original_question": "a", "query": text(20), "response": text(length - 20)}
            for length in lengths
        ],
        "openai/gsm8k": [{"question": text(100), "answer": text(90) + " #### 42"} for _ in range(60)],
        "HuggingFaceFW/finewiki": [{"text": text(900)} for _ in range(4)],
    }  # fmt: skip
    files = {name: work / f"{name.rpartition('/')[2]}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return files


def simulated(folder: Path, experiment: str, work: Path, files: dict[str, Path], code: Path | None) -> dict[str, Any]:
    """Run the script for one experiment, with the package of a checkout or the installed one. Return its largest
    reserved memory, the memory after a step as the script prints it, and its trainable parameters; or its error."""
    short = folder / "experiments" / f"{experiment}__short"
    shutil.rmtree(short, ignore_errors=True)
    shutil.copytree(folder / "experiments" / experiment, short)
    settings = short / "training_params.json"
    own = json.loads(settings.read_text()) if settings.exists() else {}
    generation = {"max_length": 800, "max_new_tokens": 1}
    settings.write_text(json.dumps({**own, "max_steps": STEPS, "eval_steps": STEPS, "generation_kwargs": generation}))
    data = [word for name, file in files.items() for word in ("--data", f"{name}={file}")]
    words = [sys.executable, "-m", "llmlab", "run", "--gpu", "L40S", "--assume", "1.5", "--json", *data, "run.py", "-v"]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(code / "src") if code else None)))
    environment = {**os.environ, "HF_HOME": str(work / "huggingface"), "TOKENIZERS_PARALLELISM": "false",
                   "PYTHONPATH": path}  # fmt: skip
    ran = subprocess.run([*words, f"experiments/{experiment}__short"], cwd=folder, env=environment, timeout=LIMIT,
                         capture_output=True, text=True, check=False)  # fmt: skip
    shutil.rmtree(short)
    after = re.search(r'"mem allocated": "(\d+)"', ran.stderr)
    trained = re.search(r"trainable params: ([\d,]+)", ran.stderr)
    if not (after and trained and ran.stdout.lstrip().startswith("{")):
        errors = re.findall(r"^(?:encountered an error: .*|[\w.]+Error: .*)$", ran.stderr, re.MULTILINE)
        return {"error": errors[0] if errors else ran.stderr.strip().splitlines()[-1]}
    report = json.loads(ran.stdout)
    return {"reserved": report["peak_reserved"], "after": int(after[1]), "trained": int(trained[1].replace(",", "")),
            "outcome": report["outcome"], "own": code is not None}  # fmt: skip


def published(file: Path) -> dict[str, Any]:
    """Return the same of a result that PEFT published."""
    train = json.loads(file.read_text(encoding="utf-8"))["train_info"]
    first = next(row for row in train["metrics"] if "mem allocated avg" in row)
    return {"reserved": train["accelerator_memory_max"], "after": first["mem allocated avg"],
            "trained": train["num_trainable_params"]}  # fmt: skip


def report(rows: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return the table: by name, what was published and what was simulated."""
    ran = {name: row for name, row in rows.items() if "error" not in row[1]}
    theirs, ours = ran[REFERENCE]
    lines, off, apart, same = [], [], [], 0
    for name, (known, made) in ran.items():
        error = made["reserved"] / known["reserved"] - 1
        known_more, made_more = ((one["after"] - base["after"]) / MiB for one, base in ((known, theirs), (made, ours)))
        same += known["trained"] == made["trained"]
        if name != REFERENCE:
            off.append(abs(error))
            apart.append(abs(made_more - known_more))
        shown = name.replace("--llama-3.2-3B", "") + (r" \*" if made.get("own") else "")
        lines.append([shown, f"{made['trained']:,}", f"{known['reserved'] / GiB:.2f}",
                      f"{made['reserved'] / GiB:.2f}", f"{error:+.1%}", f"{known_more:+,.0f}",
                      f"{made_more:+,.0f}"])  # fmt: skip
    header = ["method", "trained parameters", "reserved, published, GiB", "simulated, GiB", "off",
              "after a step, beyond LoRA's, published, MiB", "simulated, MiB"]  # fmt: skip
    text = [
        f"Of the {len(rows)} published runs, {len(ran)} can be simulated, and {same} of them train as many "
        f"parameters as was published. The largest reserved memory is off by {median(off):.1%} at the median and by "
        f"{max(off):.1%} at most. The difference from LoRA's memory after a step is off by {median(apart):.1f} MiB at "
        f"the median and by {max(apart):,.0f} MiB at most.", "",
        *titled_table("PEFT's methods for Llama-3.2-3B on an L40S", header, lines),
    ]  # fmt: skip
    if any(made.get("own") for _, made in ran.values()):
        text += [r"\* with PEFT's commit d787f51, which made all but two of the published results", ""]
    failed = [[name, made["error"][:200]] for name, (_, made) in rows.items() if "error" in made]
    if failed:
        text += titled_table("Methods that were not simulated", ["method", "message"], failed, words=True)
    return "\n".join([*text, provenance("llmlab", "torch", "transformers", "peft")])


@click.command(help=__doc__.split("\n")[0])
@click.option("--clone", envvar="PEFT", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--work", envvar="WORK", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--jobs", type=int, default=1, help="methods that are simulated at a time")
@click.option("--code", type=click.Path(path_type=Path, exists=True, file_okay=False), help="a checkout that runs")
@click.argument("names", nargs=-1)
def main(clone: Path, work: Path, out: Path | None, jobs: int, code: Path | None, names: tuple[str, ...]) -> None:
    """Run NAMES, else the methods that are not in --work yet, and write the table."""
    work.mkdir(parents=True, exist_ok=True)
    folder, kept = work / ("code" if code else "MetaMathQA"), work / "peft_methods.json"
    shutil.copytree((code or clone) / "method_comparison" / "MetaMathQA", folder, dirs_exist_ok=True)
    files = stand_ins(work.resolve())
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    published_files = sorted((clone / "method_comparison" / "MetaMathQA" / "results").glob("*--llama-3.2-3B-*.json"))
    missing = names or [file.stem for file in published_files if file.stem not in done]
    code = code and code.resolve()
    with ThreadPoolExecutor(jobs) as threads:
        runs = threads.map(
            lambda name: simulated(folder, name.replace("--", "/", 1), work.resolve(), files, code), missing
        )
        for name, made in zip(missing, runs, strict=True):
            done[name] = made
            kept.write_text(json.dumps(done, indent=1))
            print(name, made, flush=True)
    rows = {file.stem: (published(file), done[file.stem]) for file in published_files}
    text = report(rows)
    print(text)
    if out:
        write(out / "peft_methods.md", text)


if __name__ == "__main__":
    main()
