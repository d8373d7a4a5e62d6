"""What other people's scripts load and this machine lacks: configs, a tokenizer, a hundred rows of data.

    python -m benchmarks.scripts.standins --clones DIR --work DIR

Everything is made here, from the repositories in --clones, and from the package's own text. No weights: `llmlab run`
makes those from a config. Files without values, which take no room on a disk, stand in where a library reads a
checkpoint by itself. Data that a script looks for beside itself goes there, into the clones; no script is changed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Mapping
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from llmlab.data import corpus
from llmlab.specs.generic import architecture
from llmlab.specs.model import model as preset

ROWS = 128
END = "<|endoftext|>"
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # as tiktoken names them
REVISION = "0" * 40
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}

QWEN2 = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1e6,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
QWEN2_1B = {**QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
QWEN2_3B = {
    **QWEN2, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
}  # fmt: skip
QWEN2_7B = {
    **QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
ROBERTA = {
    "model_type": "roberta", "vocab_size": 50265, "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 514, "type_vocab_size": 1,
}  # fmt: skip
LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    "torch_dtype": "float16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
OPT_350M = {
    "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "word_embed_proj_dim": 512, "do_layer_norm_before": False, "torch_dtype": "float16",
    "architectures": ["OPTForCausalLM"],
}  # fmt: skip
OPT_6B = {
    "model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32,
    "word_embed_proj_dim": 4096, "torch_dtype": "float16", "architectures": ["OPTForCausalLM"],
}  # fmt: skip
BERT = {"model_type": "bert", "vocab_size": 50257, "architectures": ["BertForMaskedLM"]}
MODERNBERT = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
GPT2_XL = {**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}
SMOLLM2_360M = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 15, "num_key_value_heads": 5, "max_position_embeddings": 8192, "rope_theta": 1e5,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
T5_BASE = {
    "model_type": "t5", "vocab_size": 50300, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
    "decoder_start_token_id": 0, "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip
PYTHIA_1B = {
    "model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 8, "rotary_pct": 0.25, "torch_dtype": "float16",
    "architectures": ["GPTNeoXForCausalLM"],
}  # fmt: skip
QWEN15_2B = {
    **QWEN2, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
FEW = 2  # layers of models that are too large for a check
# Models of the presets, with the chat template of TRL's that is theirs, and all their layers or few.
PRESETS = {
    "Qwen/Qwen3-0.6B": ("Qwen/Qwen3-0.6B", "qwen3", None), "Qwen/Qwen3-1.7B": ("Qwen/Qwen3-1.7B", "qwen3", None),
    "Qwen/Qwen3-4B": ("Qwen/Qwen3-4B", "qwen3", FEW),
    "Qwen/Qwen3-4B-Instruct-2507": ("Qwen/Qwen3-4B", "qwen3_instruct_2507", FEW),
    "Qwen/Qwen2.5-Math-1.5B-Instruct": ("Qwen/Qwen2.5-1.5B", "qwen2_5", None),
    "HuggingFaceTB/SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M", "llama3_2", None),
    "NousResearch/Llama-3.2-1B": ("meta-llama/Llama-3.2-1B", "llama3_2", None),
    "meta-llama/Llama-3.2-1B-Instruct": ("meta-llama/Llama-3.2-1B", "llama3_2", None),
    "openai/gpt-oss-20b": ("openai/gpt-oss-20b", "gptoss", FEW),
}  # fmt: skip
MODELS = {
    "openai-community/gpt2": GPT2, "gpt2": GPT2, "gpt2-xl": GPT2_XL,
    "facebook/opt-350m": OPT_350M, "facebook/opt-6.7b": OPT_6B,
    "Qwen/Qwen2-0.5B": QWEN2, "Qwen/Qwen2-0.5B-Instruct": QWEN2, "Qwen/Qwen2.5-0.5B": QWEN2,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2_1B, "Qwen/Qwen2.5-3B-Instruct": QWEN2_3B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_7B, "sshleifer/tiny-gpt2": {**GPT2, "n_embd": 2, "n_layer": 2, "n_head": 2},
    "google-bert/bert-base-cased": BERT, "bert-base-cased": BERT,
    "FacebookAI/roberta-large": ROBERTA, "roberta-large": ROBERTA,
    "answerdotai/ModernBERT-base": MODERNBERT, "distilbert-base-uncased": {"model_type": "distilbert"},
    "huggyllama/llama-7b": LLAMA_7B, "meta-llama/Llama-2-7b-hf": LLAMA_7B, "google-t5/t5-base": T5_BASE,
    "t5-base": T5_BASE,
    "HuggingFaceTB/SmolLM2-360M-Instruct": SMOLLM2_360M, "HuggingFaceTB/SmolLM-360M-Instruct": SMOLLM2_360M,
    "Qwen/Qwen2-1.5B-Instruct": QWEN2_1B,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2, "trl-lib/qwen1.5-1.8b-sft": QWEN15_2B, "bert-base-uncased": BERT,
    "EleutherAI/pythia-1b-deduped": PYTHIA_1B, "trl-lib/pythia-1b-deduped-tldr-sft": PYTHIA_1B,
    "trl-lib/pythia-1b-deduped-tldr-rm": PYTHIA_1B, "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": PYTHIA_1B,
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": PYTHIA_1B,
}  # fmt: skip


class StandIns:
    """Makes them under `work`, and beside the scripts of `clones`."""

    def __init__(self, clones: Path, work: Path) -> None:
        self.clones, self.work, self.data = clones, work, work / "data"
        self.text = corpus()
        self.paragraphs = [" ".join(each.split()) for each in self.text.split("\n\n") if len(each) > 80]
        self.data.mkdir(parents=True, exist_ok=True)

    def make(self) -> None:
        """Make all; parts of repositories that are not there are passed over."""
        self.tokenizer()
        for name, config in MODELS.items():
            folder = self.model(name, config)
            if config is LLAMA_7B:
                self.sentencepiece(folder / "tokenizer.model")
        self.rows()
        self.pictures()
        self.stable_diffusion()
        beside = (self.karpathy, self.raschka, self.pytorch, self.titan, self.torchao, self.lightning, self.deepspeed)
        for part in (*beside, self.litgpt, self.nanochat, self.tune, self.nanovlm, self.trl, self.trl_rows, self.seeing,
                     self.seen, self.newer):
            try:
                part()
            except (FileNotFoundError, ImportError) as missing:
                print(f"{part.__name__}: passed over, {missing}")

    def paragraph(self, number: int) -> str:
        return self.paragraphs[number % len(self.paragraphs)]

    # ---- models and tokenizers

    def tokenizer(self) -> None:
        """Make GPT-2's tokenizer, for transformers and for tiktoken."""
        from transformers import GPT2TokenizerFast

        source = self.clones / "LLMs-from-scratch/ch02/02_bonus_bytepair-encoder/gpt2_model"
        folder, cache = self.work / "tokenizer", self.work / "tiktoken"
        for each in (folder, cache):
            each.mkdir(parents=True, exist_ok=True)
        for name, there in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
            shutil.copy(source / name, folder / there)
            shutil.copy(source / name, cache / hashlib.sha1((GPT2_FILES + name).encode()).hexdigest())
        made = GPT2TokenizerFast.from_pretrained(folder)
        made.add_special_tokens({"pad_token": END, "mask_token": END, "sep_token": END, "cls_token": END})
        made.chat_template = CHAT
        made.save_pretrained(folder)
        for name, there in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):  # for those who read these
            shutil.copy(source / name, folder / there)

    def sentencepiece(self, path: Path) -> None:
        """Make a tokenizer of the kind that Llama 1 and 2 had."""
        try:
            import sentencepiece
        except ImportError:
            print("tokenizer.model: passed over, sentencepiece is not installed")
            return
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(self.paragraphs), model_writer=made, vocab_size=4000, model_type="bpe",
            byte_fallback=True, minloglevel=2,
        )  # fmt: skip
        path.write_bytes(made.getvalue())

    def model(self, name: str, config: Mapping[str, Any]) -> Path:
        """Put a config and the tokenizer into Hugging Face's cache; return the folder."""
        entry = self.work / "huggingface" / "hub" / f"models--{name.replace('/', '--')}"
        folder = entry / "snapshots" / REVISION
        folder.mkdir(parents=True, exist_ok=True)
        (entry / "refs").mkdir(exist_ok=True)
        (entry / "refs" / "main").write_text(REVISION)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        shutil.copytree(self.work / "tokenizer", folder, dirs_exist_ok=True)
        return folder

    # ---- data

    def rows(self) -> None:
        """Write the rows that scripts load from data sets by name, and those that they read from files."""
        from datasets import ClassLabel, Dataset, Features, Value

        def say(role: str, number: int, times: int = 1) -> dict[str, str]:
            return {"role": role, "content": self.paragraph(number) * times}

        p, numbers = self.paragraph, range(ROWS)
        sets: dict[str, list[dict[str, Any]]] = {
            "text": [{"text": p(i) + "\n"} for i in range(5 * ROWS)],
            "messages": [{"messages": [say("user", i), say("assistant", i + 1, 3)]} for i in numbers],
            "preferences": [
                {"chosen": [say("user", i), say("assistant", i + 1, 2)],
                 "rejected": [say("user", i), say("assistant", i + 2)]} for i in numbers
            ],
            "kto": [
                {"prompt": [say("user", i)], "completion": [say("assistant", i + 1)], "label": i % 2 == 0}
                for i in numbers
            ],
            "prompts": [{"prompt": [say("user", i)]} for i in numbers],
            "conversations": [{"conversations": [say("user", i), say("assistant", i + 1)]} for i in numbers],
            "alpaca": [
                {"instruction": p(i)[:200], "input": "", "output": p(i + 1)[:300], "text": p(i)} for i in numbers
            ],
            "alpaca_long": [{"instruction": p(i), "input": "", "output": self.text[:4000]} for i in range(4 * ROWS)],
            "quotes": [{"quote": p(i), "author": "-", "tags": ["a"]} for i in numbers],
            "reward": [
                {"prompt": "Human: " + p(i), "response": p(i + 1), "chosen": p(i + 1), "rejected": p(i + 2)}
                for i in numbers
            ],
        }  # fmt: skip
        test = 4096  # rows of MMLU that Liger's example keeps to test by
        sets["mmlu"] = [
            {"train": {"question": p(i)[:200], "choices": [p(i + each)[:40] for each in range(4)], "answer": i % 4,
                       "subject": ""}}
            for i in range(test + 5 * ROWS)
        ]  # fmt: skip
        for name, rows in sets.items():
            (self.data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (self.data / "alpaca.json").write_text(json.dumps(sets["alpaca"]))
        names = ClassLabel(names=["not_equivalent", "equivalent"])
        features = Features(
            {"sentence1": Value("string"), "sentence2": Value("string"), "label": names, "idx": Value("int32")}
        )
        pairs = [{"sentence1": p(i)[:120], "sentence2": p(i + 1)[:120], "label": i % 2, "idx": i} for i in numbers]
        Dataset.from_list(pairs, features=features).to_parquet(str(self.data / "mrpc.parquet"))
        (self.data / "txt").mkdir(exist_ok=True)
        for name in ("a", "b"):
            (self.data / "txt" / f"{name}.txt").write_text(self.text)
        automatic = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, **automatic}
        (self.data / "zero2.json").write_text(json.dumps(zero))

    def pictures(self) -> None:
        """Write pictures of noise: two classes in two splits, the same with captions, and MNIST's files."""
        from datasets import Dataset, Features, Image, List, Value
        from PIL import Image as Picture

        noise = np.random.default_rng(0)
        captions = []
        for split in ("train", "val"):
            for kind in ("cat", "dog"):
                folder = self.data / "pictures" / split / kind
                folder.mkdir(parents=True, exist_ok=True)
                for i in range(ROWS // 2):
                    Picture.fromarray(noise.integers(0, 255, (72, 72, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        captioned = self.data / "captioned"
        captioned.mkdir(exist_ok=True)
        for i in range(ROWS // 4):
            Picture.fromarray(noise.integers(0, 255, (512, 512, 3), dtype=np.uint8)).save(captioned / f"{i}.png")
            captions.append({"file_name": f"{i}.png", "text": self.paragraph(i)[:60]})
        (captioned / "metadata.jsonl").write_text("\n".join(map(json.dumps, captions)))
        self._mnist(self.data / "MNIST" / "raw", noise)
        asked = [{"images": [str(self.data / f"pictures/train/cat/{i % (ROWS // 2)}.png")],
                  "texts": [{"user": self.paragraph(i)[:60], "assistant": self.paragraph(i + 1)[:200]}]}
                 for i in range(50_000 + 8 * ROWS)]  # fmt: skip  # nanoVLM keeps 50,000 for itself
        turn = {"user": Value("string"), "assistant": Value("string")}
        features = Features({"images": List(Image()), "texts": List(turn)})
        Dataset.from_list(asked, features=features).to_parquet(str(self.data / "questions.parquet"))

    def _mnist(self, folder: Path, noise: np.random.Generator) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for split, number in (("train", 4 * ROWS), ("t10k", ROWS)):
            pixels = noise.integers(0, 255, number * 28 * 28, dtype=np.uint8).tobytes()
            labels = noise.integers(0, 9, number, dtype=np.uint8).tobytes()
            images = struct.pack(">IIII", 2051, number, 28, 28)
            (folder / f"{split}-images-idx3-ubyte").write_bytes(images + pixels)
            (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, number) + labels)

    # ---- what scripts look for beside themselves

    def karpathy(self) -> None:
        """Tokens for nanoGPT, build-nanogpt, llm.c and modded-nanogpt, text for minGPT."""
        letters = sorted(set(self.text))
        at = {letter: number for number, letter in enumerate(letters)}
        ids = np.array([at[letter] for letter in self.text], dtype=np.uint16)
        folder = self.clones / "nanoGPT/data/shakespeare_char"
        ids[: -len(ids) // 10].tofile(folder / "train.bin")
        ids[-len(ids) // 10 :].tofile(folder / "val.bin")
        meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": at}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
        (self.clones / "minGPT/projects/chargpt/input.txt").write_text(self.text)
        tokens = self._tokens(4_000_000)
        shards = self.clones / "build-nanogpt/edu_fineweb10B"
        shards.mkdir(exist_ok=True)
        for name in ("train_000001", "val_000000"):
            np.save(shards / f"edufineweb_{name}.npy", tokens)
        hellaswag = self.clones / "build-nanogpt/hellaswag"
        hellaswag.mkdir(exist_ok=True)
        lines = [
            {"ctx": self.paragraph(i)[:80], "label": i % 4, "endings": [self.paragraph(i + k)[:60] for k in range(4)]}
            for i in range(ROWS)
        ]
        (hellaswag / "hellaswag_val.jsonl").write_text("\n".join(map(json.dumps, lines)))
        header = np.zeros(256, dtype=np.int32)  # of llm.c's files: a magic number, a version, the number of tokens
        header[:3] = 20240520, 1, len(tokens)
        muon = "modded-nanogpt/records/track_1_short/2024-10-10_Muon/data/fineweb10B"
        for place in ("llm.c/data/fineweb10B", "modded-nanogpt/data/fineweb10B", muon):
            (self.clones / place).mkdir(parents=True, exist_ok=True)
            for split in ("train", "val"):
                file = self.clones / place / f"fineweb_{split}_000001.bin"
                file.write_bytes(header.tobytes() + tokens.tobytes())

    def _tokens(self, number: int) -> np.ndarray:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(self.work / "tiktoken")
        import tiktoken

        ids = np.array(tiktoken.get_encoding("gpt2").encode(self.text[:200_000]), dtype=np.uint16)
        return np.resize(ids, number)

    def raschka(self) -> None:
        """Books, and instructions."""
        chapters = self.clones / "LLMs-from-scratch"
        for place in ("ch05/01_main-chapter-code", "ch05/10_llm-training-speed"):
            shutil.copy(chapters / "ch02/01_main-chapter-code/the-verdict.txt", chapters / place)
            (chapters / place / "middlemarch.txt").write_text((self.text * 4)[:1_800_000])
        for split in ("train", "validation", "test"):
            with (chapters / f"ch06/03_bonus_imdb-classification/{split}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("text", "label"))
                rows.writerows((self.paragraph(i), i % 2) for i in range(ROWS))

    def pytorch(self) -> None:
        """WikiText for the word-level model, and MNIST."""
        folder = self.clones / "examples/word_language_model/data/wikitext-2"
        folder.mkdir(parents=True, exist_ok=True)
        for split, characters in (("train", 60_000), ("valid", 20_000), ("test", 20_000)):
            (folder / f"{split}.txt").write_text(self.text[:characters])
        shutil.copytree(self.data / "MNIST", self.clones / "examples/data/MNIST", dirs_exist_ok=True)

    def titan(self) -> None:
        """The web's text for each torchtitan, and a tokenizer as large as Llama 3's, from which one takes its model's
        size: single bytes, pairs, and as many triples as are missing."""
        for clone in self.clones.glob("torchtitan-*"):
            crawled = clone / "tests/assets/c4_test"
            crawled.mkdir(parents=True, exist_ok=True)
            (crawled / "data.json").write_text("\n".join(json.dumps({"text": each}) for each in self.paragraphs))
        words = chain.from_iterable(product(range(256), repeat=length) for length in (1, 2, 3))
        tokens = (base64.b64encode(bytes(word)).decode() for word in islice(words, 128_000))
        (self.data / "llama3.model").write_text("\n".join(f"{token} {rank}" for rank, token in enumerate(tokens)))

    def torchao(self) -> None:
        """TinyStories' tokens, which the script holds on the card, as zeros: the file of stories has 2,228 MB, of which
        a vocabulary of 32,000 makes a token of about 4.1 bytes."""
        for folder in self.clones.glob("ao/benchmarks/quantized_training"):
            with (folder / "tinystories.bin").open("wb") as tokens:
                tokens.truncate(2 * 543_000_000)  # uint16

    def lightning(self) -> None:
        """MNIST, and WikiText for the two language models."""
        shutil.copytree(self.data / "MNIST", self.clones / "pl/Datasets/MNIST", dirs_exist_ok=True)
        for place in ("fabric/language_model", "pytorch/basics"):
            folder = self.clones / "pl/examples" / place / "data"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "wikitext-2.txt").write_text(self.text)

    def deepspeed(self) -> None:
        """CIFAR-10's six files of pictures, and the names of what is on them."""
        folder = self.clones / "DeepSpeedExamples/training/cifar/data/cifar-10-batches-py"
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(0)
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            pixels = noise.integers(0, 255, (ROWS, 3 * 32 * 32), dtype=np.uint8)
            (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(ROWS)]}))
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(number) for number in range(10)]}))

    def litgpt(self) -> None:
        """A checkpoint folder of litgpt."""
        litgpt_checkpoint(self.data / "litgpt/EleutherAI/pythia-160m", self.work / "tokenizer")

    def nanochat(self) -> None:
        """nanochat's tokenizer and shards of text."""
        import sys

        import pyarrow
        from pyarrow import parquet

        sys.path.insert(0, str(self.clones / "nanochat"))
        from nanochat.tokenizer import RustBPETokenizer

        folder = self.data / "nanochat"
        shards = folder / "base_data_climbmix"
        shards.mkdir(parents=True, exist_ok=True)
        made = RustBPETokenizer.train_from_iterator(iter([self.text]), 2048)
        made.save(str(folder / "tokenizer"))
        torch.save(torch.ones(made.get_vocab_size(), dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
        texts = [self.text[i : i + 2000] for i in range(0, len(self.text), 2000)]
        for number in range(2):
            table = pyarrow.table({"text": texts * 2})
            parquet.write_table(table, shards / f"shard_{number:05d}.parquet", row_group_size=256)

    def tune(self) -> None:
        """A checkpoint of Qwen2 0.5B, which torchtune reads by itself."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        folder = self.data / "Qwen2-0.5B"
        shutil.copytree(self.model("Qwen/Qwen2-0.5B", QWEN2), folder, dirs_exist_ok=True)
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in QWEN2.items() if k != "torch_dtype"}))
        without_values({k: v for k, v in model.to(torch.bfloat16).state_dict().items() if k != "lm_head.weight"},
                       folder / "model.safetensors")  # fmt: skip

    def nanovlm(self) -> None:
        """The two models of nanoVLM, which it reads by itself."""
        from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

        looks = SiglipVisionConfig(image_size=512, patch_size=16)
        speaks = LlamaConfig(**{k: v for k, v in SMOLLM2_360M.items() if k != "torch_dtype"})
        with torch.device("meta"):
            models = {
                "google/siglip2-base-patch16-512": SiglipVisionModel(looks),
                "HuggingFaceTB/SmolLM2-360M-Instruct": LlamaForCausalLM(speaks).to(torch.bfloat16),
            }
        for name, model in models.items():
            folder = self.model(name, model.config.to_dict())
            before = "vision_model." if "siglip" in name else ""  # on the hub, as in transformers before 5
            state = {before + key.removeprefix(before): value for key, value in model.state_dict().items()}
            without_values(state, folder / "model.safetensors")

    def trl(self) -> None:
        """The models of TRL's examples, with TRL's own chat templates."""
        from transformers import Cohere2Config, DiffusionGemmaConfig, NemotronHConfig

        templates = self.clones / "trl/trl/chat_templates"
        for name, (source, template, layers) in PRESETS.items():
            config = json.loads(json.dumps(preset(source).config, default=dict))
            config["architectures"] = [architecture(config["model_type"])]
            if layers:
                config |= {"num_hidden_layers": layers}
                config |= {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
            if config["model_type"] == "gpt_oss":  # of its config.json on the Hub
                kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
                config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
            folder = self.model(name, config)
            shutil.copy(templates / f"{template}.jinja", folder / "chat_template.jinja")
        defaults = {
            "CohereLabs/tiny-aya-global": Cohere2Config(
                hidden_size=2048, intermediate_size=11008, num_hidden_layers=FEW, num_attention_heads=16,
                num_key_value_heads=4, dtype="float16", architectures=["Cohere2ForCausalLM"],
            ),
            "google/diffusiongemma-26B-A4B-it": DiffusionGemmaConfig(
                text_config={"num_hidden_layers": FEW, "num_experts": 8, "top_k_experts": 2,
                             "moe_intermediate_size": 704},
                vision_config={"num_hidden_layers": FEW},
                architectures=["DiffusionGemmaForBlockDiffusion"],
            ),
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NemotronHConfig(
                hidden_size=2688, layers_block_type=["linear_attention", "moe", "full_attention"],
                moe_intermediate_size=1856, dtype="bfloat16", architectures=["NemotronHForCausalLM"],
            ),
        }  # fmt: skip
        shown = ("cohere2", "diffusion_gemma", "nemotron_3_nano")
        for (name, config), template in zip(defaults.items(), shown, strict=True):
            folder = self.model(name, json.loads(config.to_json_string()))
            shutil.copy(templates / f"{template}.jinja", folder / "chat_template.jinja")

    def trl_rows(self) -> None:
        """The rows of TRL's examples."""
        from datasets import Dataset

        p, numbers = self.paragraph, range(2 * ROWS)

        def say(role: str, number: int) -> dict[str, str]:
            return {"role": role, "content": p(number)[:400]}

        sets: dict[str, list[dict[str, Any]]] = {
            "gsm8k": [{"question": p(i)[:300], "answer": f"{p(i + 1)[:300]} #### {i}"} for i in numbers],
            "numina": [
                {"problem": p(i)[:300], "solution": f"\\boxed{{{i}}}", "messages": [say("user", i)]}
                for i in range(20 * ROWS)
            ],
            "steps": [
                {"prompt": p(i)[:200], "completions": [p(i + 1)[:80], p(i + 2)[:80]], "labels": [True, i % 2 == 0]}
                for i in numbers
            ],
            "tldr": [{"prompt": p(i)[:600] + " TL;DR:", "completion": " " + p(i + 1)[:120]} for i in numbers],
            "triples": [
                {"prompt": p(i)[:300], "reference": p(i + 1), "chosen": p(i + 2), "rejected": p(i + 3)}
                for i in numbers
            ],
            "answered": [{"prompt": p(i)[:300], "golden_response": p(i + 1)[:300]} for i in numbers],
            "helpful": [
                {"prompt": [say("user", i)], "chosen": [say("assistant", i + 1)], "rejected": [say("assistant", i + 2)]}
                for i in numbers
            ],
            "tools": [
                {"user_content": p(i)[:100], "tool_name": "search_google", "tool_arguments": '{"query": "a"}'}
                for i in numbers
            ],
            "cots": [{"prompt": p(i)[:200], "messages": [say("user", i), say("assistant", i + 1)]} for i in numbers],
            "genes": [{"Official Symbol A": f"A{i}", "Official Symbol B": f"B{i}"} for i in numbers],
            "genes_asked": [{"question": f"Does the gene A{i} act on B{i}?", "answer": "Yes"} for i in numbers],
        }  # fmt: skip
        for name, rows in sets.items():
            (self.data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        Dataset.from_list(sets["gsm8k"]).to_parquet(str(self.data / "gsm8k.parquet"))

    def seeing(self) -> None:
        """Models that see, with their processors."""
        from transformers import (
            CLIPImageProcessor,
            Gemma3ImageProcessor,
            Gemma3Processor,
            LlavaProcessor,
            PreTrainedTokenizerFast,
            Qwen2_5_VLProcessor,
            Qwen2VLImageProcessor,
            Qwen2VLVideoProcessor,
        )  # fmt: skip

        def tokenizer(template: str, *added: str, **named: str) -> PreTrainedTokenizerFast:
            made = PreTrainedTokenizerFast.from_pretrained(self.work / "tokenizer", extra_special_tokens=named)
            made.add_tokens(list(added), special_tokens=True)
            made.chat_template = template
            return made

        def save(name: str, config: dict[str, Any], processor: Any) -> None:
            folder = self.model(name, config)
            for file in folder.glob("token*"):
                file.unlink()
            processor.save_pretrained(folder)

        templates = self.clones / "trl/trl/chat_templates"
        words = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        says = tokenizer((templates / "qwen2_5_vl.jinja").read_text(), *words)
        config = json.loads(json.dumps(preset("Qwen/Qwen2.5-VL-3B-Instruct").config, default=dict))
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        config |= dict(zip(names, says.convert_tokens_to_ids(list(words[2:])), strict=True))
        config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
        config["text_config"]["num_hidden_layers"] = config["vision_config"]["depth"] = FEW
        config["vision_config"]["fullatt_block_indexes"] = [1]
        sees = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), says, Qwen2VLVideoProcessor(), says.chat_template)
        save("Qwen/Qwen2.5-VL-3B-Instruct", config, sees)

        says = tokenizer((templates / "llava_next.jinja").read_text(), "<image>")
        looks = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14,
                 "num_hidden_layers": FEW + 1, "num_attention_heads": 16, "image_size": 336}  # fmt: skip
        config = {
            "model_type": "llava", "text_config": {**LLAMA_7B, "vocab_size": 32064, "num_hidden_layers": FEW},
            "vision_config": looks, "image_token_index": says.convert_tokens_to_ids("<image>"),
            "architectures": ["LlavaForConditionalGeneration"], "torch_dtype": "float16",
        }  # fmt: skip
        sees = LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": 336}, crop_size=336), says, patch_size=14,
            vision_feature_select_strategy="default", chat_template=says.chat_template, num_additional_image_tokens=1,
        )  # fmt: skip
        save("llava-hf/llava-1.5-7b-hf", config, sees)

        named = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
        for name, source in (("google/gemma-3-4b-it", "4b"), ("google/gemma-3-12b-it", "12b")):
            says = tokenizer((templates / "gemma3.jinja").read_text(), **named)
            config = json.loads(json.dumps(preset(f"google/gemma-3-{source}-pt").config, default=dict))
            config |= {"boi_token_index": says.boi_token_id, "eoi_token_index": says.eoi_token_id,
                       "image_token_index": says.image_token_id, "architectures": ["Gemma3ForConditionalGeneration"]}
            config["text_config"]["num_hidden_layers"] = config["vision_config"]["num_hidden_layers"] = FEW
            looks = Gemma3ImageProcessor(size={"height": 896, "width": 896})
            save(name, config, Gemma3Processor(looks, says, says.chat_template))

    def seen(self) -> None:
        """Rows with pictures, for models that see."""
        from datasets import Dataset, Features, Image, List, Value

        def turn(role: str, *parts: dict[str, str]) -> dict[str, Any]:
            return {"role": role, "content": list(parts)}

        p, picture = self.paragraph, str(self.data / "captioned/0.png")
        small = str(self.data / "pictures/train/cat/0.png")
        image = {"type": "image", "text": None}
        shown = [{"images": [picture], "messages": [
            turn("user", {"type": "text", "text": p(i)[:100]}, image),
            turn("assistant", {"type": "text", "text": p(i + 1)[:200]})]} for i in range(ROWS)]  # fmt: skip
        part = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})
        features = Features({"images": List(Image()), "messages": part})
        Dataset.from_list(shown, features=features).to_parquet(str(self.data / "shown.parquet"))
        compared = [{"images": [picture], "prompt": [
            turn("user", image, {"type": "text", "text": p(i)[:100]})],
            "chosen": [turn("assistant", {"type": "text", "text": p(i + 1)[:200]})],
            "rejected": [turn("assistant", {"type": "text", "text": p(i + 2)[:200]})]} for i in range(ROWS)]
        features = Features({"images": List(Image()), "prompt": part, "chosen": part, "rejected": part})
        Dataset.from_list(compared, features=features).to_parquet(str(self.data / "compared.parquet"))
        solved = [{"image": small, "problem": p(i)[:100], "solution": f"\\boxed{{{i}}}"} for i in range(2 * ROWS)]
        features = Features({"image": Image(), "problem": Value("string"), "solution": Value("string")})
        Dataset.from_list(solved, features=features).to_parquet(str(self.data / "solved.parquet"))

    def stable_diffusion(self) -> None:
        """Stable Diffusion 1's folder, and its decoder under a name of the hub."""
        try:
            from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
        except ImportError as missing:
            print(f"stable_diffusion: passed over, {missing}")
            return
        from transformers import CLIPTextConfig

        folder = self.data / "stable-diffusion"
        width = [128, 256, 512, 512]
        with torch.device("meta"):
            unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
            decoder = AutoencoderKL(
                down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
                block_out_channels=width, layers_per_block=2, latent_channels=4, sample_size=512,
            )  # fmt: skip
        by_name = self.model("stabilityai/sd-vae-ft-ema", {})
        for model, place in ((unet, folder / "unet"), (decoder, folder / "vae"), (decoder, by_name)):
            model.save_config(place)
            without_values(model.state_dict(), place / "diffusion_pytorch_model.safetensors")
        wide = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "vocab_size": 49408}
        CLIPTextConfig(**wide, architectures=["CLIPTextModel"]).save_pretrained(folder / "text_encoder")
        DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").save_config(
            folder / "scheduler"
        )
        self._clip_tokenizer(folder / "tokenizer")
        parts = {
            "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
            "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
            "scheduler": ["diffusers", "DDPMScheduler"],
        }  # fmt: skip
        (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", **parts}))

    def newer(self) -> None:
        """What the repositories of 2024 to 2026 read: bytes of text, puzzles, features of pictures, FLUX and SD 3."""
        import gzip

        from PIL import Image as Picture

        with gzip.open(self.clones / "x-transformers/data/enwik8.gz", "wb", compresslevel=1) as file:
            file.write((self.text.encode() * (95_000_000 // len(self.text) + 1))[:95_000_000])
        shutil.copytree(self.data / "MNIST", self.clones / "minRF/data/MNIST", dirs_exist_ok=True)
        for kind, shape in (("features", (1, 4, 32, 32)), ("labels", (1,))):
            folder = self.data / f"features/imagenet256_{kind}"
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(4 * ROWS):
                np.save(folder / f"{i}.npy", np.ones(shape, dtype=np.float32 if len(shape) > 1 else np.int64))
        stories = self.clones / "llama2.c/data/tok4096"
        stories.mkdir(parents=True, exist_ok=True)
        for name in ("data00", "data01"):
            (np.arange(1_000_000) % 4096).astype(np.uint16).tofile(stories / f"{name}.bin")
        sudoku = self.data / "sudoku/train"
        sudoku.mkdir(parents=True, exist_ok=True)
        about = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 11, "seq_len": 81,
                 "num_puzzle_identifiers": 1, "total_groups": 8 * ROWS, "mean_puzzle_examples": 1, "sets": ["all"],
                 "total_puzzles": 8 * ROWS}  # fmt: skip
        order = np.arange(8 * ROWS + 1, dtype=np.int32)
        grids = np.ones((8 * ROWS, 81), dtype=np.uint8)
        arrays = {"inputs": grids, "labels": grids, "puzzle_identifiers": 0 * order[:-1], "puzzle_indices": order,
                  "group_indices": order}  # fmt: skip
        (sudoku / "dataset.json").write_text(json.dumps(about))
        for name, array in arrays.items():
            np.save(sudoku / f"all__{name}.npy", array)
        shutil.copytree(sudoku, sudoku.parent / "test", dirs_exist_ok=True)
        asked = [{"id": str(i), "image": f"{i}.png", "system_prompt": "", "conversations": [
            {"from": "human", "value": "<image>\n" + self.paragraph(i)[:80]},
            {"from": "gpt", "value": self.paragraph(i + 1)[:200]}]} for i in range(ROWS // 4)]  # fmt: skip
        (self.data / "asked.json").write_text(json.dumps(4 * asked))
        (self.data / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
        p, numbers = self.paragraph, range(2 * ROWS)
        triplets = [{"anchor": p(i)[:100], "positive": p(i + 1)[:100], "negative": p(i + 2)[:100]}
                    for i in range(100 * ROWS)]  # fmt: skip
        scored = [{"sentence1": p(i)[:100], "sentence2": p(i + 1)[:100], "score": 0.5} for i in numbers]
        for name, rows in (("triplets", triplets), ("scored", scored)):
            (self.data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        template = json.loads((self.clones / "picotron/template/base_config.json").read_text())
        template["distributed"]["dp_size"] = 8
        (self.data / "picotron.json").write_text(json.dumps(template))
        flowers = self.data / "instance"
        flowers.mkdir(exist_ok=True)
        Picture.new("RGB", (512, 512)).save(flowers / "0.png")
        self.flux()

    def flux(self) -> None:
        """FLUX.1 and Stable Diffusion 3, of few layers."""
        from diffusers import (
            AutoencoderKL,
            FlowMatchEulerDiscreteScheduler,
            FluxTransformer2DModel,
            SD3Transformer2DModel,
        )  # fmt: skip
        from transformers import CLIPTextConfig, T5Config

        width = [128, 256, 512, 512]
        with torch.device("meta"):
            flux = FluxTransformer2DModel(num_layers=FEW, num_single_layers=FEW, guidance_embeds=True)
            sd3 = SD3Transformer2DModel(
                sample_size=128, patch_size=2, in_channels=16, num_layers=FEW, attention_head_dim=64,
                num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536,
                pooled_projection_dim=2048, out_channels=16, pos_embed_max_size=192,
            )  # fmt: skip
            decoder = AutoencoderKL(
                down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
                block_out_channels=width, layers_per_block=2, latent_channels=16, sample_size=1024,
                scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
            )  # fmt: skip
        clip = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "vocab_size": 49408}
        large = {**clip, "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20,
                 "num_hidden_layers": 32, "projection_dim": 1280}  # fmt: skip
        projected = "CLIPTextModelWithProjection"
        t5 = T5Config(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=FEW, num_heads=64,
                      feed_forward_proj="gated-gelu", architectures=["T5EncoderModel"])  # fmt: skip
        encoders = {
            "FluxPipeline": {"": CLIPTextConfig(**clip, architectures=["CLIPTextModel"]), "_2": t5},
            "StableDiffusion3Pipeline": {
                "": CLIPTextConfig(**clip, projection_dim=768, architectures=[projected]),
                "_2": CLIPTextConfig(**large, architectures=[projected]), "_3": t5,
            },
        }  # fmt: skip
        named = (("FluxPipeline", "flux", flux), ("StableDiffusion3Pipeline", "sd3", sd3))
        for pipeline, name, transformer in named:
            folder = self.data / name
            parts = {"transformer": ["diffusers", type(transformer).__name__], "vae": ["diffusers", "AutoencoderKL"],
                     "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}  # fmt: skip
            for model, place in ((transformer, "transformer"), (decoder, "vae")):
                model.save_config(folder / place)
                without_values(model.state_dict(), folder / place / "diffusion_pytorch_model.safetensors")
            FlowMatchEulerDiscreteScheduler(shift=3.0).save_config(folder / "scheduler")
            for number, config in encoders[pipeline].items():
                config.save_pretrained(folder / f"text_encoder{number}")
                is_t5 = config.model_type == "t5"
                words = folder / f"tokenizer{number}"
                self._t5_tokenizer(words) if is_t5 else self._clip_tokenizer(words)
                parts[f"text_encoder{number}"] = ["transformers", config.architectures[0]]
                parts[f"tokenizer{number}"] = ["transformers", "T5TokenizerFast" if is_t5 else "CLIPTokenizer"]
            (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, **parts}))

    def _t5_tokenizer(self, folder: Path) -> None:
        from transformers import T5TokenizerFast

        words = ["<pad>", "</s>", "<unk>", *(chr(9601) + chr(n) for n in range(33, 383)), *map(chr, range(33, 127))]
        vocabulary = [(word, -float(number)) for number, word in enumerate(words)]
        T5TokenizerFast(vocab=vocabulary, extra_ids=0).save_pretrained(folder)

    def _clip_tokenizer(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        letters = [chr(number) for number in range(33, 127)]
        words = [*letters, *(letter + "</w>" for letter in letters), "ab"]
        vocabulary = {word: number for number, word in enumerate(words)}
        vocabulary |= {"<|startoftext|>": 49406, END: 49407}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\na b\n")
        settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>",
                    "eos_token": END, "unk_token": END, "pad_token": END}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def litgpt_checkpoint(folder: Path, tokenizer: Path) -> None:
    """Make a checkpoint folder of litgpt, named as the model is, whose tensors are one number each, spread out."""
    from dataclasses import asdict

    import yaml
    from litgpt.config import Config
    from litgpt.model import GPT

    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    config = Config.from_name(folder.name)
    (folder / "model_config.yaml").write_text(yaml.dump(asdict(config)))
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    state = {name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in model.state_dict().items()}
    torch.save(state, folder / "lit_model.pth")


def without_values(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a checkpoint whose values are a hole in the file: zeros, which take no room."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@click.command()
@click.option("--clones", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), required=True)
def main(clones: Path, work: Path) -> None:
    """Make the stand-ins."""
    StandIns(clones.resolve(), work.resolve()).make()


if __name__ == "__main__":
    main()
