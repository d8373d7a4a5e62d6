"""The files that start a run."""

import os
import re
import stat
import subprocess
from dataclasses import replace

import pytest
import yaml

import llmlab as lab
from llmlab.base.compat import KNOWN

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
SKY = {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}


def written(folder, run, gpus="A100-80GB", model=TINY):
    return lab.write(model, run, gpus, folder)


def settings(folder, name):
    return yaml.safe_load((folder / name).read_text())


def test_megatron_is_started_with_the_setting_that_its_parallelism_demands(tmp_path):
    """validate_args stops without it where tensors or sequences are divided, on GPUs up to Hopper."""
    run = lab.Training(dp=2, precision="mixed-bf16", seq_len=64, stack="megatron")
    for folder, divided in (("copies", {}), ("tensors", {"tp": 2}), ("sequences", {"cp": 2})):
        divided_run = replace(run, **divided)
        written(tmp_path / folder, divided_run, f"{divided_run.world_size}xA100-80GB")
        demanded = "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n" in (tmp_path / folder / "launch.sh").read_text()
        assert demanded == bool(divided)


@pytest.mark.parametrize(("stack", "expands"), [
    ("torchtitan", True),  # run_train.sh, which launch.sh stands for
    ("megatron", False),
    ("megatron:expandable_segments=true", True),
])  # fmt: skip
def test_segments_expand_where_they_were_counted_so(tmp_path, stack, expands):
    run = lab.Training(dp=2, zero=3 if stack == "torchtitan" else 1, seq_len=64, stack=stack)
    written(tmp_path / "out", run, "2xA100-80GB", "meta-llama/Llama-3.1-8B")
    said = "\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    assert (said in (tmp_path / "out" / "launch.sh").read_text()) == expands


def test_a_blocking_launch_is_exported(tmp_path):
    run = lab.Training(dp=2, zero=1, seq_len=64, stack="megatron:cuda_launch_blocking=true")
    written(tmp_path / "out", run, "2xA100-80GB", "meta-llama/Llama-3.1-8B")
    assert "\nexport CUDA_LAUNCH_BLOCKING=1\n" in (tmp_path / "out" / "launch.sh").read_text()


def test_shells_and_skypilot_read_what_starts_it(tmp_path):
    written(tmp_path / "out", lab.Training(dp=16, zero=3, precision="mixed-bf16", seq_len=64), "2x8xA100-80GB")
    for name in ("launch.sh", "job.sbatch"):
        subprocess.run(["bash", "-n", tmp_path / "out" / name], check=True)
    task = settings(tmp_path / "out", "sky.yaml")
    assert set(task) <= SKY and task["resources"] == {"accelerators": "A100-80GB:8"} and task["num_nodes"] == 2
    assert os.stat(tmp_path / "out" / "launch.sh").st_mode & stat.S_IXUSR
    stopped = subprocess.run(["bash", tmp_path / "out" / "launch.sh"], capture_output=True, text=True,
                             env={"PATH": os.environ["PATH"]})  # fmt: skip
    assert stopped.returncode and "set the learning rate" in stopped.stderr


def test_skypilot_brings_what_megatrons_launch_script_asks_for(tmp_path):
    """Its package has no pretrain_gpt.py, and the tokenizer and the updates are arguments that no plan knows."""
    run = lab.Training(dp=2, tp=4, zero=1, precision="mixed-bf16", seq_len=4096, stack="megatron")
    written(tmp_path / "out", run, "8xH100-80GB", "meta-llama/Llama-3.1-8B")
    task = settings(tmp_path / "out", "sky.yaml")
    asked = set(re.findall(r"\$\{(\w+):\?", (tmp_path / "out" / "launch.sh").read_text()))
    assert asked == {"LR", "MEGATRON"} <= set(task["envs"])
    subprocess.run(["bash", "-n", "-c", task["setup"] + task["run"]], check=True)
    assert f"git clone --depth 1 --branch core_v{KNOWN['megatron'][1]}" in task["setup"]
    (tmp_path / "out" / "launch.sh").write_text('echo "$@"')
    started = subprocess.run(["bash", "-c", task["run"]], capture_output=True, text=True, cwd=tmp_path / "out",
                             env={"PATH": os.environ["PATH"], "ARGS": "--train-iters 9"})  # fmt: skip
    assert started.stdout == "--train-iters 9\n"


def test_a_claimed_name_is_a_comment_whatever_it_is(tmp_path):
    name = 'x"""\nimport os\n"""'
    written(tmp_path / "out", lab.Training(seq_len=64), model=TINY | {"_name_or_path": name})
    for path in ("train.py", "launch.sh", "job.sbatch"):
        assert '\nimport os\n"' not in (tmp_path / "out" / path).read_text()
    compile((tmp_path / "out" / "train.py").read_text(), "train.py", "exec")
