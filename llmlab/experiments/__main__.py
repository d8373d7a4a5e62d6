"""One launcher for the experiments: `python -m llmlab.experiments zero --ranks 2 --stage 3 --engine scratch --json`."""

from __future__ import annotations

import sys

NAMES = (
    "data_parallel", "zero", "tensor_parallel", "pipeline", "three_d", "offload", "experts", "cluster", "hf_trainer",
)  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run the experiment that the first argument names with the others; `NAME --help` lists its options."""
    name, options = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("data_parallel", "zero"):
        from . import train

        train.main(name, options)
    elif name in ("tensor_parallel", "pipeline"):
        from . import train_split

        train_split.main(name, options)
    elif name == "three_d":
        from . import three_d

        three_d.main(options)
    elif name == "offload":
        from . import offload

        offload.main(options)
    elif name == "experts":
        from . import experts

        experts.main(options)
    elif name == "cluster":
        from . import cluster

        cluster.main(options)
    elif name == "hf_trainer":
        from . import hf_trainer

        hf_trainer.main(options)
    elif name in ("-h", "--help"):
        print(f"python -m llmlab.experiments NAME --help, of {', '.join(NAMES)}")
    else:
        print(f"experiment {name!r} is not one of {', '.join(NAMES)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
