"""The command nvidia-smi, for scripts that call it."""

from click.testing import CliRunner

from llmlab.cli import main as cli


def run(*words):
    return CliRunner().invoke(cli.cli, ["run", *map(str, words)])


def test_nvidia_smi_names_the_card_and_has_no_driver(script):
    body = """
import subprocess
print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout)
assert subprocess.run(["nvidia-smi", "--query-gpu=memory.used"], capture_output=True).returncode == 9
step()
"""
    result = run("--gpu", "T4", script(body))
    assert result.exit_code == 0 and result.stdout.startswith("NVIDIA-SMI T4, "), result.stderr
