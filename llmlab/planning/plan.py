"""The best configuration for a model, some GPUs and a batch: searched by estimate, confirmed by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from ..base.errors import SpecError
from ..base.units import show_seconds
from ..hardware.gpu import assumed_memory
from ..specs.model import ModelLike
from ..specs.model import model as find_model
from ..specs.run import Training
from ..specs.stacks import TRANSFORMERS, StackOptions, options_of, resolved
from .confirm import confirm
from .machines import Machines, machines, priced
from .nearest import fitting, nearest
from .result import Plan, lost
from .search import NO_PROGRAM, WORSE, Search
from .space import ALLOWED, GOALS, METHODS, Question

INTERRUPTED = "Interrupted before a configuration was found."


def plan(
    model: ModelLike,
    gpus: str,
    global_batch: int,
    method: str = "full",
    allow: Sequence[str] = (),
    tokens: int | None = None,
    goal: str = "fastest",
    fixed: Mapping[str, Any] | None = None,
    within: float | None = None,
    stack: StackOptions | str = TRANSFORMERS,
    executor: Executor | None = None,
) -> Plan:
    """Return the plan of `lab.plan`, which documents the arguments."""
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    fixed = dict(fixed or {})
    check_question(global_batch, method, allow, tokens, goal, fixed, within)
    target, stack_options = machines(gpus), options_of(resolved(fixed.pop("stack", stack)))
    check_degrees(fixed, target if goal != "cheapest" else None, global_batch)
    if method != "full" and (why := stack_options.without_lora):
        raise SpecError(f"method={method!r} and stack={stack_options.name!r} contradict each other: {why}")
    spec = find_model(model)
    question = Question(spec, global_batch, method, frozenset(allow), fixed, stack_options, goal, tokens, within)
    choices = list(priced(target)) if goal == "cheapest" else [target]
    search = Search(question, choices)
    confirmed = confirm(search, executor)
    search.cuts[WORSE] = search.worse()
    if not search.tried and search.cut == search.cuts[NO_PROGRAM] and not confirmed.interrupted:
        raise search.refused or SpecError(f"global_batch={global_batch} sequences and gpus={gpus!r}: no number of "
                                          "data-parallel ranks divides both; give another batch")  # fmt: skip
    ranked = confirmed.candidates
    tried, cuts = search.tried, dict(search.cuts)  # before `around` adds to them
    if ranked:
        candidates = (ranked[0], *(replace(other, lost=lost(other, ranked[0], goal)) for other in ranked[1:]))
        search.around(search.estimate_of(ranked[0].run, ranked[0].machines))
    else:
        candidates = ()
    none = not candidates and not confirmed.interrupted
    notes = () if goal == "cheapest" else assumed_memory(gpus.lstrip("0123456789x"))
    return Plan(
        model=spec.name,
        gpus=f"any GPU with a price, up to {target.total}" if goal == "cheapest" else str(target),
        goal=goal,
        global_batch=global_batch,
        candidates=candidates,
        tried=tried,
        cuts=cuts,
        refuted=tuple(confirmed.refuted),
        tokens=tokens,
        nearest=nearest(question, target) if none else (),
        problem=_problem(question, choices) if none else "" if candidates else INTERRUPTED,
        interrupted=confirmed.interrupted,
        seen=tuple(search.seen),
        notes=notes,
    )


def _problem(question: Question, choices: Sequence[Machines]) -> str:
    """Return a sentence why a question has no answer: nothing fits, or even the fastest run misses the deadline."""
    if question.within is None:
        return "Nothing fits."
    without_deadline = replace(question, within=None, goal="fastest")
    times = [(candidate.seconds or 0.0) / (candidate.run.global_batch * candidate.run.seq_len) * (question.tokens or 0)
             for machines in choices if (candidate := fitting(without_deadline, machines))]  # fmt: skip
    if not times:
        return "Nothing fits."
    within = f"{question.within:g} day{'s' if question.within != 1 else ''}"
    return f"Nothing finishes within {within}: the fastest run takes {show_seconds(min(times))}."


def check_question(
    global_batch: int,
    method: str,
    allow: Sequence[str],
    tokens: int | None,
    goal: str,
    fixed: Mapping[str, Any],
    within: float | None,
) -> None:
    """Raise SpecError for an invalid argument, or for two that contradict each other; the message names both."""
    if method not in METHODS:
        raise SpecError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if goal not in GOALS:
        raise SpecError(f"goal={goal!r} is not one of {', '.join(GOALS)}")
    if unknown := sorted(set(allow) - set(ALLOWED)):
        raise SpecError(f"allow={unknown[0]!r} is not one of {', '.join(ALLOWED)}")
    for name, value in (("global_batch", global_batch), ("tokens", tokens), ("within", within)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name != "within" else (int, float)):
            raise SpecError(f"{name}={value!r} is a {type(value).__name__}; give a number")
        if value <= 0:
            raise SpecError(f"{name}={value!r} is too small; give more than 0")
    if within is not None and tokens is None:
        raise SpecError(f"within={within!r} days needs tokens=, the number of tokens to train on")
    names = [*Training().to_dict(), "stack"]
    if unknown := sorted(set(fixed) - set(names)):
        raise SpecError(f"fixed={unknown[0]!r} is not a field of Training; its fields are {', '.join(names)}")
    if fixed.get("lora") and method == "full":
        raise SpecError("fixed lora contradicts method='full'; give method='lora'")
    if fixed.get("quantization") and method != "qlora":
        raise SpecError(f"fixed quantization={fixed['quantization']!r} contradicts method={method!r}; "
                        "give method='qlora'")  # fmt: skip
    if fixed.get("quantization") == "gptq":
        raise SpecError("fixed quantization='gptq': no file that plan writes trains on AutoGPTQ's layers; give "
                        "'nf4' or 'int8', or ask lab.estimate")  # fmt: skip
    for name in ("images", "num_labels", "method"):
        if fixed.get(name) not in (None, 0, "sft"):
            raise SpecError(f"fixed {name}={fixed[name]!r}: plan writes files that train language models on the next "
                            f"tokens of text; leave out {name}, or ask lab.estimate and lab.fix")  # fmt: skip
    if both := sorted((set(fixed) & set(allow)) - {"seq_len"}):  # shorter lengths than the fixed one are tried
        raise SpecError(f"{both[0]} is fixed to {fixed[both[0]]!r} and also allowed to change; give one of the two")


def check_degrees(fixed: Mapping[str, Any], machines: Machines | None, global_batch: int) -> None:
    """Raise SpecError if fixed fields contradict the GPUs (None: not given) or the global batch."""
    degrees = {name: fixed[name] for name in ("dp", "tp", "pp", "cp", "micro_batch", "accumulation") if name in fixed}
    Training(**{**degrees, "seq_len": fixed.get("seq_len", 1024)})  # raises if one is no positive integer
    parallel = {name: value for name, value in degrees.items() if name in ("dp", "tp", "pp", "cp")}
    size = 1
    for value in parallel.values():
        size *= value
    degrees_text = ", ".join(f"{name}={value}" for name, value in parallel.items())
    if machines and (machines.total % size or (len(parallel) == 4 and size != machines.total)):
        raise SpecError(f"fixed {degrees_text} and gpus={str(machines)!r} contradict each other: {size} ranks "
                        f"{'are not' if len(parallel) == 4 else 'do not divide'} {machines.total} GPUs")  # fmt: skip
    batch = {name: value for name, value in degrees.items() if name in ("dp", "micro_batch", "accumulation")}
    size = 1
    for value in batch.values():
        size *= value
    if global_batch % size or (len(batch) == 3 and size != global_batch):
        degrees_text = ", ".join(f"{name}={value}" for name, value in batch.items())
        raise SpecError(f"fixed {degrees_text} and global_batch={global_batch} contradict each other: "
                        f"{size} {'is not' if len(batch) == 3 else 'does not divide'} {global_batch}")  # fmt: skip
