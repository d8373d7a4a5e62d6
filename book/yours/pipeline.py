"""Your pipeline parallelism: when a schedule ends, and which layers a stage has."""

# ---- chapter 15


def done_at(plan, inputs, seconds):
    """Return the time at which the last operation of `plan` ends, or None if it deadlocks.

    `plan` has a list of operations for each rank, which runs them in this order. An
    operation starts when its rank is free and all of `inputs(op)` have ended, and it takes
    `seconds(op)`. In a deadlock, ranks wait for each other.
    """
    raise NotImplementedError


def cut(seconds, stages):
    """Return how many layers each stage has, so that the slowest stage is as fast as possible.

    `seconds` has the time of each layer. A stage has one or more neighbouring layers.
    """
    raise NotImplementedError
