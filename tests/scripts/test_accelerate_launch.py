"""`llmlab run accelerate launch`: the script gets the plugins that accelerate's own launcher would give it."""

import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

from llmlab.cli import main as cli  # noqa: E402

# https://github.com/XLabs-AI/x-flux/issues/12 has this kind of file.
CONFIG = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, zero3_init_flag: true, gradient_accumulation_steps: 1}
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
TRAIN = """
import torch
from accelerate import Accelerator, DeepSpeedPlugin
accelerator = Accelerator(PLUGIN)
print(accelerator.distributed_type, accelerator.num_processes)
if accelerator.state.deepspeed_plugin:
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(2):
    accelerator.backward(model(torch.randn(8, 2048, device=accelerator.device)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
BY_HAND = (
    'mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True, '
    "gradient_accumulation_steps=1)"
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script behind a launcher; return its report and the lines of what it printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero3.yaml").write_text(CONFIG)

    def run(body, *launcher):
        (tmp_path / "train.py").write_text(body)
        result = CliRunner().invoke(cli.cli, ["run", "--json", "--gpu", "A100-80GB", *launcher, "train.py"])
        assert result.exit_code == 0, (result.stderr, result.exception)
        return json.loads(result.stdout), result.stderr.splitlines()

    return run


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--config_file", "zero3.yaml"], "DEEPSPEED 4"),
        (["--use_deepspeed", "--zero_stage", "2", "--num_processes", "1"], "DEEPSPEED 1"),
        (["--use_fsdp", "--num_processes", "1"], "FSDP 1"),
        (["--num_processes", "4"], "MULTI_GPU 4"),
        (["--num_processes", "1"], "NO 1"),
    ],
)
def test_each_kind_of_launch_is_what_the_script_finds(run, options, kind):
    body = TRAIN.replace("PLUGIN", "").split("if accelerator")[0]
    assert f"DistributedType.{kind}" in run(body, "accelerate", "launch", *options)[1]


def test_a_plugin_of_the_launcher_takes_what_it_takes_from_the_script(run):
    launched, printed = run(TRAIN.replace("PLUGIN", ""), "accelerate", "launch", "--config_file", "zero3.yaml")
    assert "DistributedType.DEEPSPEED 4" in printed and launched["steps"] == 2
    by_hand, _ = run(TRAIN.replace("PLUGIN", BY_HAND), "torchrun", "--nproc_per_node", "4")
    assert (launched["peak_allocated"], launched["world_size"]) == (by_hand["peak_allocated"], 4)


def test_deepspeed_s_script_may_import_from_the_working_directory(run, tmp_path):
    """accelerate adds it to PYTHONPATH, for DeepSpeed alone."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.py").write_text("import beside")
    line = ["accelerate", "launch", "--use_deepspeed", "--num_processes", "1", "folder/train.py"]
    assert CliRunner().invoke(cli.cli, ["run", "--gpu", "A100-80GB", *line]).exit_code == 0
