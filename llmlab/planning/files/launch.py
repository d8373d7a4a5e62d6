"""The files that start a run: launch.sh for each node, and the Slurm and SkyPilot jobs that call it."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.version import MEGATRON
from ...engines.texts import yaml_text

# SkyPilot's names of GPUs, by ours (catalogs/v8/common/accelerators.csv of its catalog).
SKY_GPUS = {
    "T4": "T4", "L4": "L4", "A10G": "A10G", "L40S": "L40S", "V100-16GB": "V100", "V100-32GB": "V100-32GB",
    "A100-40GB": "A100", "A100-80GB": "A100-80GB", "H100-80GB": "H100", "H200": "H200", "B200": "B200",
    "RTX-3060": "RTX3060", "RTX-3090": "RTX3090", "RTX-4090": "RTX4090", "RTX-5090": "RTX5090", "A10": "A10",
    "RTX-A6000": "RTXA6000", "RTX-6000-Ada": "RTX6000-Ada", "H100-NVL": "H100-NVL", "GH200": "GH200",
    "MI300X": "MI300X",
}  # fmt: skip
PORT = 29500  # torchrun's own default
MEGATRON_CLONE = (
    "[ -d Megatron-LM ] || "
    f"git clone --depth 1 --branch core_v{MEGATRON} https://github.com/NVIDIA/Megatron-LM\n"
)


def launch_script(
    title: str, program: str, nodes: int, per_node: int, alone: bool, arguments: str, exports: Sequence[str] = ()
) -> str:
    """Return launch.sh, which starts torchrun on one of `nodes` nodes, or python if the process is `alone`. `program`
    is the script with its arguments, `arguments` shows those that the user adds, and `exports` are environment
    variables with their values."""
    lines = [
        "#!/bin/bash", f"# {title}.", f"#     LR=... ./launch.sh{arguments}", "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        ': "${LR:?set the learning rate, which no plan knows: LR=... ./launch.sh}"',
        *(f"export {setting}" for setting in exports),
    ]  # fmt: skip
    ranks = f"--nproc-per-node {per_node}"
    if nodes > 1:
        lines += ["# On each node: NODE_RANK is its number from 0, HEAD the address of the first."]
        ranks = (f'--nnodes {nodes} --node-rank "${{NODE_RANK:?0 to {nodes - 1}}}" '
                 f'--master-addr "${{HEAD:?the address of node 0}}" --master-port {PORT} {ranks}')  # fmt: skip
    return "\n".join([*lines, f'exec {"python" if alone else f"torchrun {ranks}"} {program} "$@"', ""])


def slurm_job(title: str, nodes: int, per_node: int, arguments: str) -> str:
    """Return job.sbatch, which runs launch.sh once on each node. The user sets time, account and partition."""
    return f"""#!/bin/bash
# {title}.
#     LR=... sbatch job.sbatch{arguments}
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1   # one torchrun per node, which starts a process per GPU
#SBATCH --gpus-per-node={per_node}
#SBATCH --time=24:00:00       # yours to set, as are partition and account
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' "$SLURM_SUBMIT_DIR/launch.sh" "$@"
"""


def sky_task(title: str, gpu: str, nodes: int, per_node: int, packages: list[str], data: bool) -> str | None:
    """Return sky.yaml for `sky launch`; None for a GPU that SkyPilot has no name for. `data` says whether the program
    is train.py; others have arguments of their own. Megatron-LM's script is in its repository, not in its package."""
    if gpu not in SKY_GPUS:
        return None
    clones = any(package.startswith("megatron-core") for package in packages)
    variable, words = ("DATA", ' ${DATA:+--data "$DATA"}') if data else ("ARGS", " $ARGS")
    task = {
        "name": "train",
        "num_nodes": nodes,
        "resources": {"accelerators": f"{SKY_GPUS[gpu]}:{per_node}"},
        "workdir": ".",
        "envs": {"LR": "", variable: "", **({"MEGATRON": "Megatron-LM"} if clones else {})},
        "setup": f"pip install {' '.join(packages)}\n" + MEGATRON_CLONE * clones,
        "run": 'export NODE_RANK=$SKYPILOT_NODE_RANK HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
               f'bash launch.sh{words}\n',
    }  # fmt: skip
    env = " --env DATA=train.txt" if data else ' --env ARGS="..."'
    return f"# {title}.\n#     sky launch sky.yaml --env LR=...{env}\n" + yaml_text(task)
