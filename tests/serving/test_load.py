"""How long prompts take in the steps of an engine."""

import llmlab as lab
from llmlab.serving.load import prefill_seconds
from llmlab.serving.step import ROW_HOST, Step, step_seconds

LLAMA, H100 = lab.model("meta-llama/Llama-3.1-8B"), lab.gpu("H100")


def test_a_prompt_that_is_read_in_steps_of_its_own_gives_nobody_a_token():
    """A token more is sampled, sent and scheduled."""
    service = lab.Service(prompt_len=512, output_len=64)
    with_a_token = sum(step_seconds(LLAMA, service, H100, Step(1, 1, 512)).values())
    assert with_a_token - prefill_seconds(LLAMA, service, H100) > ROW_HOST / 2
