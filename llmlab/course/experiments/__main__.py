"""One launcher for the experiments: `python -m llmlab.course.experiments zero --ranks 2 --stage 3 --json`."""

from __future__ import annotations

import sys
from importlib import import_module

MODULES = {
    "data_parallel": "train", "zero": "train", "tensor_parallel": "train", "pipeline": "train", "three_d": "train",
    "cluster": "cluster", "hf_trainer": "hf_trainer", "gpt_mistakes": "gpt_mistakes",
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run the experiment named by the first argument with the other arguments; `NAME --help` lists its options."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(f"python -m llmlab.course.experiments NAME --help, of {', '.join(MODULES)}")
    elif name in MODULES:
        import_module(f".{MODULES[name]}", __package__).main(arguments[1:], name)
    else:
        print(f"experiment {name!r} is not one of {', '.join(MODULES)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
