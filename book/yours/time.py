"""Seconds: your predictions of a step, and your readings of a profile."""

from collections import Counter

# ---- chapter 5


def step_time(operators, rate, bandwidth, launch):
    raise NotImplementedError


def active(parameters, layers, experts, expert, chosen):
    raise NotImplementedError


# ---- chapter 10, "Reading a profile"


def end_of(call):
    return call["ts"] + call["dur"]


def is_inside(call, outer):
    same_thread = call["tid"] == outer["tid"] and call is not outer
    return same_thread and outer["ts"] <= call["ts"] and end_of(call) <= end_of(outer)


def self_times(calls):
    """Return the self time of each name in microseconds."""
    result = Counter()
    for thread in {call["tid"] for call in calls}:
        stack = []
        in_thread = [call for call in calls if call["tid"] == thread]
        for call in sorted(in_thread, key=lambda call: (call["ts"], -call["dur"])):
            while stack and end_of(stack[-1]) <= call["ts"]:
                stack.pop()
            if stack:
                result[stack[-1]["name"]] -= call["dur"]
            result[call["name"]] += call["dur"]
            stack.append(call)
    return result


def gaps(kernels):
    raise NotImplementedError


def share_of(calls, part, text):
    raise NotImplementedError


# ---- chapter 11


def averaged_at(gradients, bucket_bytes, latency, beta):
    """Return the second at which all gradients are averaged.

    `gradients` are pairs (second at which it is complete, bytes), in the order of the
    backward pass. A bucket takes gradients while it has at most `bucket_bytes` bytes. Its
    message takes latency + bytes / beta seconds. It starts when the bucket is complete and
    the link is free.
    """
    raise NotImplementedError
