"""llmlab's models in EleutherAI's lm-evaluation-harness, through its own model interface, and two tasks for it.

A task of the harness asks one of three questions: how likely is this continuation of that context ("loglikelihood";
multiple choice compares several), how likely is this whole text ("loglikelihood_rolling"), and what does the model
write until this stop text ("generate_until"). The two tasks need no download: they are made from any text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...base.errors import NotAvailable, SpecError
from ..inference.forward import limits
from ..inference.generate import generate
from .perplexity import perplexity

try:
    from datasets import Dataset
    from lm_eval import evaluator
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import ConfigurableTask
except ModuleNotFoundError:
    raise NotAvailable("the evaluation harness is not installed: pip install lm-eval") from None

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class HarnessModel(TemplateLM):
    """A model and its tokenizer behind the harness's interface. `end_of_text` is the token put before every text."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, end_of_text: int) -> None:
        super().__init__()
        self.model, self.tokenizer, self.end_of_text = model, tokenizer, end_of_text
        self._device = next(model.parameters()).device
        _, self.window = limits(model)

    @property
    def eot_token_id(self) -> int:
        """The token that the harness puts before a text without a context."""
        return self.end_of_text

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """Return the ids of `string`."""
        return self.tokenizer.encode(string).ids

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) and whether each of its tokens is the likeliest, for every request."""
        return [self._scored(context, continuation) for _, context, continuation in requests]

    @torch.no_grad()
    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        # The last token is only predicted, never read: window + 1 tokens fit.
        read = torch.tensor((context + continuation)[-(self.window + 1) :][:-1], device=self.device)
        output = self.model(read[None])
        logits = getattr(output, "logits", output)[0, -len(continuation) :]
        scores = logits.double().log_softmax(-1)  # (tokens of the continuation, V)
        wanted = torch.tensor(continuation[-len(scores) :], device=self.device)
        # Multiples of 2^-30 add up without rounding: continuations that tie do so on every processor.
        chosen = (scores.gather(1, wanted[:, None]) * 2**30).round().sum().item() / 2**30
        return chosen, bool((scores.argmax(-1) == wanted).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p(text) for every request, by `evaluate.perplexity` with windows that do not overlap."""
        likelihoods = []
        for request in requests:
            ids = torch.tensor([self.end_of_text, *self.tok_encode(request.args[0])], device=self.device)
            likelihoods.append(-perplexity(self.model, ids, self.window, self.window).nll)
        return likelihoods

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, always the likeliest token, up to the first stop text."""
        answers = []
        for request in requests:
            context, options = request.args
            new = int(options.get("max_gen_toks", 64))
            prompt = torch.tensor(self.tok_encode(context)[-(self.window - new) :], device=self.device)
            answer = self.tokenizer.decode(generate(self.model, prompt, new)[len(prompt) :].tolist())
            for stop in options.get("until", []):
                answer = answer.split(stop)[0]
            answers.append(answer)
        return answers


def text_task(name: str, texts: Sequence[str]) -> ConfigurableTask:
    """Return a task that asks how likely `texts` are: perplexity per word and per byte, and bits per byte."""
    rows = Dataset.from_list([{"text": text} for text in texts])
    averages = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity"}
    metrics = [
        {"metric": metric, "aggregation": averages.get(metric, metric), "higher_is_better": False}
        for metric in (*averages, "bits_per_byte")
    ]
    return _task(name, rows, "loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}", metric_list=metrics)


def choice_task(
    name: str, text: str, questions: int = 40, context: int = 40, ending: int = 10, seed: int = 0
) -> ConfigurableTask:
    """Return a multiple-choice task: which of four endings follows? Three follow the same word elsewhere in the text.

    All four are written well and begin with the same word, so the last word of the context does not tell them apart.
    `context` and `ending` are in words. "acc_mutual_info" asks by how much the context makes an ending likelier, which
    leaves out that a short ending, or one of frequent words, is likely anywhere. Raises SpecError for a text that is
    too short, or that has no word four times.
    """
    words, chance = re.findall(r"\s*\S+", text), random.Random(seed)
    if len(words) < 2 * (context + ending):
        raise SpecError(f"a text of {len(words)} words; give at least {2 * (context + ending)}")
    places: dict[str, list[int]] = {}
    for place in range(context, len(words) - ending):
        places.setdefault(words[place].strip(), []).append(place)
    begins = [place for same in places.values() if len(same) > 3 for place in same]
    if not begins:
        raise SpecError(f"a text of {len(words)} words, none of which is there four times: give a longer one")
    rows: list[dict[str, Any]] = []
    for right in chance.choices(begins, k=questions):
        wrong = chance.sample([place for place in places[words[right].strip()] if place != right], 3)
        endings = [right, *wrong]
        chance.shuffle(endings)
        texts = ["".join(words[place : place + ending]).strip() for place in endings]
        before = "".join(words[right - context : right])
        rows.append({"context": before, "endings": texts, "right": endings.index(right)})
    names = ("acc", "acc_norm", "acc_mutual_info")
    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in names]
    return _task(
        name, Dataset.from_list(rows), "multiple_choice", doc_to_text="{{context}}", doc_to_choice="endings",
        doc_to_target="right", metric_list=metrics,
    )  # fmt: skip


def _task(name: str, rows: Dataset, kind: str, **config: Any) -> ConfigurableTask:
    data = {"test": rows}
    return ConfigurableTask(
        config={"task": name, "custom_dataset": lambda **_: data, "test_split": "test", "output_type": kind, **config}
    )


def evaluate(model: HarnessModel, tasks: Sequence[ConfigurableTask]) -> dict[str, dict[str, float]]:
    """Return each task's metrics by its name, as the harness computes them."""
    named = {task.config.task: task for task in tasks}
    results = _evaluated(model, named, log_samples=False)
    return {
        name: {key.partition(",")[0]: value for key, value in metrics.items() if isinstance(value, float)}
        for name, metrics in results["results"].items()
    }


def answers(model: HarnessModel, task: ConfigurableTask, metric: str = "acc") -> list[float]:
    """Return `metric` for each question of one task, in their order: 1 is right. For paired comparisons of models."""
    samples = _evaluated(model, {task.config.task: task}, log_samples=True)["samples"][task.config.task]
    return [float(sample[metric]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def _evaluated(model: HarnessModel, tasks: dict[str, ConfigurableTask], log_samples: bool) -> dict[str, Any]:
    return evaluator.evaluate(model, tasks, bootstrap_iters=0, log_samples=log_samples)
