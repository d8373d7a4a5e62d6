"""Command lines of scripts: what runs, with which arguments, as how many ranks."""

import pytest

from llmlab.base.errors import SpecError
from llmlab.scripts.command import Command, command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_a_script_keeps_its_arguments_as_they_are(here):
    assert command(["train.py", "--steps", "3", "--json"]) == Command("train.py", ("--steps", "3", "--json"))
    assert command(["python", "-u", "train.py", "-u"]) == Command("train.py", ("-u",))
    assert command(["-m", "package.train", "a"]) == Command("package.train", ("a",), module=True)
    assert command(["A=1", "B=x=y", "python", "train.py"]).environment == {"A": "1", "B": "x=y"}
    script = command(["python", "-X", "faulthandler", "-Wignore", "-W", "error::UserWarning", "-OO", "train.py", "-W"])
    assert script == Command("train.py", ("-W",))
    assert command(["python3.11", "-m", "package.train"]) == Command("package.train", (), module=True)


def test_torchrun_says_how_many_ranks(here):
    words = ["torchrun", "--nnodes=16", "--nproc_per_node=8", "--rdzv_backend=c10d", "train.py", "--lr", "1"]
    assert command(words) == Command("train.py", ("--lr", "1"), nodes=16, gpus_per_node=8)
    words = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "package.train"]
    assert command(words) == Command("package.train", (), module=True, nodes=1, gpus_per_node=2)
    assert command(["torchrun", "--nproc_per_node=gpu", "train.py"]).gpus_per_node is None


def test_accelerate_says_its_ranks_and_what_it_would_set(here):
    pytest.importorskip("accelerate")
    words = ["accelerate", "launch", "--num_processes", "8", "--num_machines", "2", "--mixed_precision", "bf16"]
    found = command([*words, "--multi_gpu", "--machine_rank", "0", "--main_process_ip", "h", "--main_process_port", "1",
                     "train.py", "--mixed_precision", "no"])  # fmt: skip
    assert (found.nodes, found.gpus_per_node) == (2, 4)
    assert found.arguments == ("--mixed_precision", "no")
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, zero3_init_flag: true, offload_optimizer_device: cpu, gradient_accumulation_steps: 4}
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
FSDP = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: false, fsdp_offload_params: true}
mixed_precision: bf16
num_machines: 1
num_processes: 1
"""


@pytest.mark.parametrize(
    ("options", "config", "ranks", "environment"),
    [
        ([], DEEPSPEED, (1, 4), {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                                 "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                                 "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16"}),
        (["--zero_stage", "2"], DEEPSPEED, (1, 4), {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
        (["--use_deepspeed", "--num_processes", "1"], "", (1, 1), {"ACCELERATE_USE_DEEPSPEED": "true"}),
        (["--use_deepspeed", "--num_processes", "16", "--num_machines", "2", "--main_process_ip", "h"], "", (2, 8),
         {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ([], FSDP, (1, 1), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}),
        (["--use_megatron_lm", "--num_processes", "8", "--megatron_lm_tp_degree", "2"], "", (1, 8),
         {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"}),
        (["--num_processes", "4", "--dynamo_backend", "inductor"], "", (1, 4),
         {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        (["--num_processes", "4"], "distributed_type: 'NO'", (None, None), {}),  # one process, on a GPU too
    ],
)  # fmt: skip
def test_accelerate_starts_what_its_options_and_its_file_say(here, options, config, ranks, environment):
    pytest.importorskip("accelerate")
    if "DEEPSPEED" in str(environment):
        pytest.importorskip("deepspeed")
    (here / "config.yaml").write_text("compute_environment: LOCAL_MACHINE\n" + config)
    file = ["--config_file", "config.yaml"] if config else []
    found = command(["accelerate", "launch", *file, *options, "train.py", "--lr", "1"])
    assert (found.nodes, found.gpus_per_node) == ranks
    assert found.environment.items() >= environment.items()
    assert found.arguments == ("--lr", "1") and not found.notes


def test_of_accelerate_s_file_the_rank_that_is_not_simulated_is_told(here):
    pytest.importorskip("accelerate")
    config = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\nmachine_rank: 1\nmain_process_ip: h\n"
    (here / "config.yaml").write_text(f"{config}main_process_port: 1\n")
    found = command(["accelerate", "launch", "--config_file", "config.yaml", "train.py"])
    assert [note.code for note in found.notes] == ["rank-0-simulated"] and (found.nodes, found.gpus_per_node) == (2, 8)


def test_accelerate_on_the_cpu_assumes_no_gpus(here):
    pytest.importorskip("accelerate")
    assert not command(["accelerate", "launch", "--cpu", "train.py"]).notes


def test_accelerate_says_that_it_assumes_one_gpu(here):
    pytest.importorskip("accelerate")
    found = command(["accelerate", "launch", "train.py"])
    assert (found.nodes, found.gpus_per_node) == (None, None) and any("--num_processes" in each for each in found.notes)


@pytest.mark.parametrize(
    "words", [["accelerate-launch"], ["python", "-u", "-m", "accelerate.commands.launch"],
              ["python", "-m", "accelerate.commands.accelerate_cli", "launch"]],
)  # fmt: skip
def test_accelerate_has_several_names(here, words):
    pytest.importorskip("accelerate")
    found = command([*words, "--num_processes", "2", "train.py"])
    assert (found.target, found.gpus_per_node) == ("train.py", 2)


def test_a_library_s_command_is_found_in_the_library_s_own_clone(here, monkeypatch):
    """Where a folder has the name of the command."""
    (here / "swift").mkdir()
    (here / "bin").mkdir()
    (here / "bin" / "swift").write_text("#!/usr/bin/env python\n")
    (here / "bin" / "swift").chmod(0o755)
    monkeypatch.setenv("PATH", str(here / "bin"))
    found = command(["swift", "sft", "--model", "m"])
    assert found.tool and found.target == str(here / "bin" / "swift") and found.arguments == ("sft", "--model", "m")


def test_the_old_launcher_of_torch_gives_its_local_rank_as_an_argument(here):
    words = ["python", "-m", "torch.distributed.launch", "--nproc_per_node", "2"]
    assert command([*words, "train.py"]).arguments == ("--local-rank=0",)
    assert command([*words, "--use_env", "train.py"]).arguments == ()


def test_deepspeed_takes_the_gpus_that_are_included(here):
    pytest.importorskip("deepspeed")
    (here / "hosts").write_text("a slots=8\nb slots=8\nc slots=8\n")
    found = command(["deepspeed", "--include", "localhost:0,3", "train.py"])
    assert (found.nodes, found.gpus_per_node) == (1, 2)
    found = command(["deepspeed", "--hostfile", "hosts", "--exclude", "b", "train.py"])
    assert (found.nodes, found.gpus_per_node) == (2, 8)
    found = command(["deepspeed", "--hostfile", "hosts", "--num_nodes", "2", "--num_gpus", "4", "train.py"])
    assert (found.nodes, found.gpus_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script"),
        (["nowhere.py"], "nowhere.py does not exist"),
        (["-m"], "-m needs the name of a module"),
        (["torchrun", "--nproc_per_node=2"], "torchrun --nproc_per_node=2: "),
        (["torchrun", "--nnodes", "$NNODES", "train.py"], "--nnodes $NNODES is no number"),
        (["torchrun", "--nnodes", "0", "train.py"], "--nnodes 0 is no number"),
        (["torchrun", "--nproc_per_node", "two", "train.py"], "--nproc_per_node two is no number"),
        (["torchrun", "--not-an-option", "train.py"], "train.py: unrecognized arguments: --not-an-option"),
        (["accelerate", "env"], "accelerate env starts no script"),
        (["accelerate", "launch", "--tpu", "train.py"], "TPUs"),
        (["accelerate", "launch", "--no_python", "train.py"], "--no_python"),
        (["accelerate", "launch", "--mpirun_hostfile", "hosts", "train.py"], "mpirun"),
        (["accelerate", "launch", "--use_fsdp", "--multi_gpu", "train.py"], "only use one of"),
        (["accelerate", "launch", "--config_file", "nowhere.yaml", "train.py"], "nowhere.yaml"),
        (["accelerate", "launch", "--config_file", "empty.yaml", "train.py"], "settings by name"),
        (["torchrun", "--no-python", "train.py"], "--no_python"),
        (["deepspeed", "--include", "localhost:0@elsewhere:1", "train.py"], "elsewhere"),
        (["mpirun", "-np", "4", "python", "train.py", "--lr", "1"], "mpirun: its options are not read"),
        (["mpirun", "-np", "4", "python", "train.py", "--lr", "1"], "starts (train.py --lr 1)"),
        (["srun", "--nodes=2", "torchrun", "--nnodes=2", "train.py"], "starts (torchrun --nnodes=2 train.py)"),
        (["colossalai", "run", "--nproc_per_node", "4", "train.py"], "colossalai: its options are not read"),
        (["python", "-c", "print(1)"], "put the code into a file"),
        (["."], "a folder without __main__.py"),
    ],
)
def test_what_starts_no_script_is_refused_with_what_to_give(here, words, said):
    (here / "empty.yaml").write_text("# num_processes: 2\n")
    with pytest.raises(SpecError) as error:
        command(words)
    assert said in str(error.value)


def test_the_rank_of_another_node_is_not_carried_out_and_that_is_said(here):
    words = ["torchrun", "--nnodes=2", "--nproc_per_node=8", "train.py"]
    first, second = (command([*words[:1], f"--node_rank={rank}", *words[1:]]) for rank in (0, 1))
    (note,) = second.notes
    assert note.startswith("--node_rank 1 was not carried out: rank 0") and not first.notes
