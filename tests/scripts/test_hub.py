"""Models that scripts load by name: a config stands in for the weights, and what is not here is refused by name."""

import json
import os
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from llmlab.base.errors import SpecError
from llmlab.cli import main as cli
from llmlab.scripts.hub import read_configs
from llmlab.scripts.missing import refused
from llmlab.specs.model import model as find_model

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "dtype": "bfloat16",
}  # fmt: skip
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cuda")
print(type(model).__name__, sum(p.numel() for p in model.parameters()), model.dtype, torch.cuda.memory_allocated())
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache, and as working directory a folder with a script and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "load.py").write_text(LOAD)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def run(*words):
    return CliRunner().invoke(cli.cli, ["run", "--gpu", "A100-40GB", *words])


def test_a_preset_loads_by_its_name_without_weights(home):
    result = run("load.py", "HuggingFaceTB/SmolLM2-135M")
    assert result.exit_code == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("LlamaForCausalLM"))
    name, parameters, dtype, allocated = line.split()
    spec = find_model("HuggingFaceTB/SmolLM2-135M")
    assert (name, int(parameters)) == ("LlamaForCausalLM", spec.parameters)
    assert int(allocated) >= spec.parameters * (2 if dtype == "torch.bfloat16" else 4)


def test_a_config_of_the_user_s_stands_in_for_any_name(home):
    result = run("--config", "me/mine=config.json", "load.py", "me/mine")
    assert result.exit_code == 0, result.stderr
    assert f"LlamaForCausalLM {find_model(TINY).parameters} torch.bfloat16 " in result.stdout
    assert sorted(os.listdir(home)) == ["config.json", "load.py"]


def test_a_script_finds_the_class_by_the_config(home):
    """As TRL's trainers do for a model's name."""
    (home / "find.py").write_text("""
import transformers
config = transformers.AutoConfig.from_pretrained("HuggingFaceTB/SmolLM2-135M")
print(getattr(transformers, config.architectures[0]).__name__)
""")
    result = run("find.py")
    assert result.exit_code == 0, result.stderr
    assert "LlamaForCausalLM" in result.stdout


@pytest.mark.parametrize(("model", "options", "warned"), [
    ("HuggingFaceTB/SmolLM2-135M", "", True), ("HuggingFaceTB/SmolLM2-135M", ", dtype=torch.bfloat16", False),
    ("gpt2", "", False), ("me/mine", "", False),
])  # fmt: skip
def test_weights_in_float32_for_want_of_a_dtype_are_said(home, model, options, warned):
    (home / "load.py").write_text(f"""
import torch
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained("{model}"{options}).dtype)
""")
    result = run("--config", "me/mine=config.json", "load.py")
    assert result.exit_code == 0, result.stderr
    assert ("its config names no dtype" in result.stderr) == warned
    if warned:
        assert "torch.float32" in result.stdout


def test_the_host_holds_the_weights_in_their_own_dtype(home):
    """The checkpoint that stands for a downloaded one is created in fp32, which is no memory of the script's."""
    (home / "load.py").write_text("""
import torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", dtype=torch.bfloat16).cuda()
""")
    found = json.loads(run("--gpu", "T4", "--json", "load.py").stdout)
    assert found["host_peak"] == pytest.approx(found["peak_allocated"], rel=0.02)


@pytest.mark.parametrize(
    ("options", "warned"), [("", True), (", quantization_config=Mxfp4Config(dequantize=True)", False)]
)
def test_weights_that_the_hub_has_in_mxfp4_are_said(home, options, warned):
    config = {**TINY, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    (home / "config.json").write_text(json.dumps(config))
    (home / "load.py").write_text(f"""
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config
AutoModelForCausalLM.from_pretrained("me/mine", dtype=torch.bfloat16{options})
""")
    result = run("--config", "me/mine=config.json", "load.py")
    assert result.exit_code == 0, result.stderr
    assert ("is published in MXFP4" in result.stderr) == warned


def test_the_script_s_config_stays_as_it_was(home):
    (home / "load.py").write_text("""
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained("HuggingFaceTB/SmolLM2-135M")
AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", config=config)
print("its dtype:", config.dtype)
""")
    assert "its dtype: None" in run("load.py").stdout


def test_models_within_a_model_load_under_zero3(home):
    pytest.importorskip("deepspeed")
    looks = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    config = {"model_type": "llava", "text_config": TINY, "vision_config": {"model_type": "clip_vision_model", **looks}}
    (home / "llava.json").write_text(json.dumps({**config, "architectures": ["LlavaForConditionalGeneration"]}))
    (home / "zero3.py").write_text("""
import torch
from transformers import AutoModelForImageTextToText
from transformers.integrations import HfDeepSpeedConfig
zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
torch.distributed.init_process_group()
model = AutoModelForImageTextToText.from_pretrained("me/mine")
print({p.ds_numel > 0 and p.numel() == 0 for p in model.parameters()})
""")
    result = run("--config", "me/mine=llava.json", "--world-size", "2", "zero3.py")
    assert result.exit_code == 0, result.stderr
    assert "{True}" in result.stdout


def test_experts_load_too(home):
    several = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    experts = TINY | {"model_type": "mixtral"} | several
    (home / "config.json").write_text(json.dumps(experts))
    result = run("--config", "me/mine=config.json", "load.py", "me/mine")
    assert f"MixtralForCausalLM {find_model(experts).parameters} torch.bfloat16 " in result.stdout, result.stderr


def test_a_folder_with_a_config_alone_loads(home):
    (home / "model").mkdir()
    (home / "config.json").rename(home / "model" / "config.json")
    assert "LlamaForCausalLM " in run("load.py", "model").stdout
    assert os.listdir(home / "model") == ["config.json"]
    assert json.loads((home / "model" / "config.json").read_text()) == TINY


def test_a_part_of_a_pipeline_loads_from_its_subfolder(home):
    (home / "pipeline" / "text").mkdir(parents=True)
    (home / "config.json").rename(home / "pipeline" / "text" / "config.json")
    (home / "load.py").write_text(LOAD.replace("sys.argv[1],", "'pipeline', subfolder='text',"))
    assert "LlamaForCausalLM " in run("load.py").stdout


def test_an_entry_of_the_cache_without_weights_stands_in_too(home):
    snapshot = home / "cache" / "models--me--cached" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (home / "config.json").rename(snapshot / "config.json")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert "LlamaForCausalLM " in run("load.py", "me/cached").stdout
    assert os.listdir(snapshot) == ["config.json"]
    assert json.loads((snapshot / "config.json").read_text()) == TINY  # not by way of a link either


def test_a_name_that_is_nowhere_is_refused_with_what_to_give(home):
    result = run("load.py", "nobody/nothing")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "downloads nothing" in result.stderr and "--config NAME=config.json" in result.stderr


def test_nothing_is_uploaded(home):
    """As transformers' Trainer does with push_to_hub=True."""
    (home / "push.py").write_text("""
from huggingface_hub import HfApi
url = HfApi().create_repo("mine", exist_ok=True)
job = HfApi().upload_folder(repo_id=url.repo_id, folder_path=".", commit_message="", run_as_future=True)
print("pushed", url.repo_id, job.result().repo_name)
""")
    result = run("push.py")
    assert result.exit_code == 0, result.stderr
    assert "pushed you/mine mine" in result.stdout and "nothing was uploaded to mine" in result.stderr


def test_a_log_that_would_go_to_a_space_stays_here(home, monkeypatch):
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    (home / "trackio.py").write_text("def init(project, space_id=None): print('logs', project, space_id)")
    (home / "log.py").write_text("import trackio\ntrackio.init('mine', space_id='me/space')")
    result = run("log.py")
    sys.modules.pop("trackio", None)
    assert result.exit_code == 0, result.stderr
    assert "logs mine None" in result.stdout and "space_id='me/space' was not carried out" in result.stderr


def test_a_tokenizer_without_its_files_is_refused(home):
    asked = "AutoTokenizer.from_pretrained('Qwen/Qwen3-0.6B')"
    (home / "load.py").write_text(f"from transformers import AutoTokenizer\n{asked}")
    result = run("load.py")
    assert result.exit_code == 2 and "the tokenizer of Qwen/Qwen3-0.6B: " in result.stderr, result.stderr
    assert "load.py, line 2)" in result.stderr


def test_other_errors_are_the_script_s():
    class LocalEntryNotFoundError(Exception):
        pass

    assert refused(ValueError("x")) is None
    wrapped = OSError("gone")
    wrapped.__cause__ = LocalEntryNotFoundError("models/x")
    message = refused(wrapped)
    assert message is not None and str(message).startswith("gone; llmlab run downloads nothing")
    assert refused(ConnectionError("Couldn't reach 'imdb' on the Hub (OfflineModeIsEnabled)")) is not None
    assert refused(ConnectionError("refused by host")) is None


@pytest.mark.parametrize(
    "given", ["config.json", "=config.json", "name=", "name=text.json", "name=list.json", "name=deep.json"]
)
def test_bad_configs_are_refused(home, given):
    (home / "text.json").write_text("no json")
    (home / "list.json").write_text("[1]")
    (home / "deep.json").write_text("[" * 100_000)
    with pytest.raises(SpecError):
        read_configs((given,))
