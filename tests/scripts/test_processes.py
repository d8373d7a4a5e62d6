"""Processes that a script starts."""

import json
import subprocess
import sys


def codes(found):
    return [note["code"] for note in found["notes"]]


def alone(*words):
    """Run in a process of its own."""
    line = [sys.executable, "-m", "llmlab", "run", "--json", "--gpu", "A100-40GB", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def test_processes_of_the_script_s_own_have_the_card_and_only_the_answer_is_on_stdout(script):
    body = """
import atexit, multiprocessing
def work(queue): queue.put(torch.ones(1 << 20, device="cuda").numel())
if __name__ == "__main__":
    atexit.register(print, "last words")
    os.system("echo a process")
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start(); print(method, queue.get()); process.join()
"""
    done = alone(script(body))
    found = json.loads(done.stdout)
    assert (done.returncode, found["outcome"]) == (2, "unknown")  # all of the work was elsewhere
    assert codes(found) == ["other-processes"]
    assert all(line in done.stderr for line in ("fork 1048576", "spawn 1048576", "last words", "a process"))
