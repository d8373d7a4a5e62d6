"""The training methods' step is TRL's: its own trainers, run by `llmlab run`, have the same peak."""

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("trl", minversion="1.16")

import llmlab as lab
from llmlab.cli.main import cli

BATCH, TOKENS, WORDS = 2, 512, 8192
CONFIG = {"model_type": "llama", "vocab_size": WORDS, "hidden_size": 512, "intermediate_size": 1408,
          "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
          "tie_word_embeddings": False}  # fmt: skip
HEAD = f"""
import torch, transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
B, T, V = {BATCH}, {TOKENS}, {WORDS}
words = {{**{{f"w{{i}}": i for i in range(V - 3)}}, "<unk>": V - 3, "<eos>": V - 2, "<pad>": V - 1}}
made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>",
                                                 unk_token="<unk>")
config = transformers.AutoConfig.for_model(**{CONFIG!r})
def model():
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
def text(count):
    return " ".join(f"w{{i}}" for i in range(count))
def data(**row):
    return {{"train_dataset": Dataset.from_list([row] * 8), "processing_class": tokenizer}}
common = dict(output_dir="out", per_device_train_batch_size=B, max_steps=2, bf16=False, gradient_checkpointing=False,
              report_to=[], save_strategy="no", optim="adamw_torch", max_grad_norm=0.0)
"""
PAIRS = 'data(prompt="w0", chosen=" " + text(T - 2), rejected=" " + text(T - 2))'
TRAINERS = {
    "dpo": f"""from trl import DPOConfig, DPOTrainer
DPOTrainer(model(), model(), DPOConfig(**common, max_length=T), **{PAIRS}).train()
""",
    "orpo": f"""from trl.experimental.orpo import ORPOConfig, ORPOTrainer
ORPOTrainer(model(), ORPOConfig(**common, max_length=T), **{PAIRS}).train()
""",
    "kto": """from trl import KTOConfig, KTOTrainer
rows = [{"prompt": "w0", "completion": " " + text(T - 2), "label": bool(i % 2)} for i in range(8)]
KTOTrainer(model(), model(), KTOConfig(**common, max_length=T), train_dataset=Dataset.from_list(rows),
           processing_class=tokenizer).train()
""",
    "reward": """from trl import RewardConfig, RewardTrainer
config.num_labels, config.pad_token_id = 1, V - 1
scorer = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
RewardTrainer(scorer, RewardConfig(**common, max_length=T), **data(chosen=text(T - 1), rejected=text(T - 1))).train()
""",
    "distill": """from trl.experimental.gkd import GKDConfig, GKDTrainer
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
said = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": text(T - 1)}]
GKDTrainer(model(), model(), GKDConfig(**common, max_length=T, beta=0.0, lmbda=0.0), **data(messages=said)).train()
""",
    "grpo": """from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(**common, num_generations=B, max_completion_length=12)
GRPOTrainer(model(), lambda completions, **_: [0.0] * len(completions), args, **data(prompt=text(T - 12))).train()
""",
}  # fmt: skip


@pytest.mark.parametrize("method", TRAINERS)
def test_simulate_has_the_peak_of_trls_trainer(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD + TRAINERS[method])
    result = CliRunner().invoke(cli, ["run", "--json", "--gpu", "A100-80GB", "train.py"])
    assert result.exit_code == 0, (result.stderr, result.exception)
    report = json.loads(result.stdout)
    more = {"completion_len": 12, "generations": BATCH} if method == "grpo" else {}
    run = lab.Training(method=method, micro_batch=BATCH, seq_len=TOKENS, precision="bf16", **more)
    assert lab.simulate(CONFIG, run, "A100-80GB").peak_allocated == pytest.approx(report["peak_allocated"], rel=0.01)
