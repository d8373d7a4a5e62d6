"""A plan: every candidate holds the global batch, fits by its simulation, and says why it lost."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.cli.main import cli
from llmlab.planning.confirm import NotSimulated
from llmlab.planning.files.write import program
from llmlab.planning.search import NO_PROGRAM
from llmlab.plots.pareto import CHOSEN, REFUTED


def test_a_plan_holds_the_batch_and_is_confirmed(tiny):
    assert len(tiny) >= 3 and tiny.best is tiny[0]
    for candidate in tiny:
        assert candidate.run.global_batch == 16 and candidate.run.world_size == 4
        assert candidate.simulation is not None or candidate.unconfirmed
        assert candidate.simulation is None or candidate.simulation.outcome != "out of memory"
    assert any(candidate.simulation for candidate in tiny)


@pytest.mark.parametrize(("stack", "method"), [("torchtune", "full"), ("torchtune", "lora"), ("litgpt", "lora")])
def test_a_stack_that_trains_in_half_is_planned_in_half(stack, method, llama):
    plan = lab.plan(llama, "4xA100-80GB", 16, method=method, fixed={"seq_len": 128}, stack=stack,
                    executor=NotSimulated("not asked"))  # fmt: skip
    assert plan.best.run.precision == "bf16" and plan.best.run.stack.name == stack
    assert (plan.best.run.lora is not None) == (method == "lora")


@pytest.mark.parametrize(("fixed", "optimizer"), [({}, "adamw-8bit"), ({"optimizer": "adamw"}, "adamw")])
def test_a_plan_leaves_to_its_stack_what_is_not_fixed(fixed, optimizer, llama):
    plan = lab.plan(llama, "A100-80GB", 4, fixed={"seq_len": 128, **fixed}, stack="torchtune",
                    executor=NotSimulated("not asked"))  # fmt: skip
    assert {each.run.optimizer for each in plan} == {optimizer}
    assert {each.run.checkpointing for each in plan.seen} == {None, "full"}


def test_a_plan_leaves_out_what_of_a_stack_is_not_described(llama):
    """torchtitan's experts without FSDP2."""
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    mixed = {**llama, "model_type": "qwen3_moe", **experts}
    with ThreadPoolExecutor(1) as one:
        plan = lab.plan(mixed, "2xA100-80GB", 2, fixed={"seq_len": 128}, stack="torchtitan", executor=one)
    assert len(plan) and all(each.run.zero for each in plan)


def test_the_picture_marks_the_chosen_one(tiny):
    picture = tiny.plot()
    assert f"{len([each for each in tiny.seen if each.seconds])} configurations" in picture.alt
    (ax,) = picture.axes
    labels = [text.get_text() for text in picture.legends[0].get_texts()]
    assert {"no ZeRO", "ZeRO-3", "full checkpointing", "chosen"} <= set(labels)
    chosen = [points for points in ax.collections if points.get_sizes()[0] == CHOSEN]
    (place,) = chosen[0].get_offsets().tolist()
    assert place[0] == pytest.approx(tiny.best.report.step_seconds)
    empty = lab.plan("meta-llama/Llama-3.1-8B", "T4", 8)
    with pytest.raises(lab.SpecError, match="nothing fits"):
        empty.plot()


def test_the_picture_crosses_out_what_was_refuted_and_draws_no_front_through_it(tiny):
    first = min((each for each in tiny.seen if each.seconds), key=lambda each: each.seconds)
    picture = replace(tiny, refuted=(first.run,)).plot()
    assert "1 are crossed out" in picture.alt and "crossed out" not in tiny.plot().alt
    assert "refuted by simulation" in [text.get_text() for text in picture.legends[0].get_texts()]
    (crosses,) = (points for points in picture.axes[0].collections if points.get_sizes()[0] == REFUTED)
    assert crosses.get_offsets().tolist()[0][0] == first.seconds
    front = picture.axes[0].lines[0].get_xydata().tolist()  # others may be as quick
    assert crosses.get_offsets().tolist()[0] not in front and min(front)[0] >= first.seconds


@pytest.mark.parametrize(("model", "gpus", "method"), [
    ("meta-llama/Llama-3.1-8B", "8xH100-80GB", "full"), ("meta-llama/Llama-3.1-70B", "8xH100-80GB", "lora"),
    ("mistralai/Mixtral-8x7B-v0.1", "64xH100-80GB", "full"),
])  # fmt: skip
def test_a_plan_is_of_what_a_program_runs(model, gpus, method):
    plan = lab.plan(model, gpus, 64, method=method, fixed={"seq_len": 4096}, executor=NotSimulated("Not here."))
    assert len(plan) > 3 and plan.cuts[NO_PROGRAM] > 0
    for candidate in plan:
        assert program(lab.model(model), candidate.run)


def test_where_no_program_runs_what_is_fixed_it_says_why():
    with pytest.raises(lab.SpecError, match=r"lora=.*tp=2"):
        lab.plan("gpt2", "2xA100-80GB", 8, method="lora", fixed={"tp": 2}, executor=NotSimulated("Not here."))


def test_adapters_are_on_layers_that_the_model_has():
    plan = lab.plan("gpt2", "T4", 8, method="lora", fixed={"seq_len": 256}, executor=NotSimulated("Not here."))
    assert plan.best.run.lora.targets == ("c_attn",)
    names = {lever.name for lever in lab.fix("gpt2", lab.Training(micro_batch=64), "T4").levers}
    assert "LoRA of rank 16" in names


def test_a_field_typed_as_an_option_is_told_where_it_goes():
    done = CliRunner().invoke(cli, ["plan", "gpt2", "--gpus", "T4", "--global-batch", "8", "--seq-len", "512"])
    assert done.exit_code == 2 and "--fixed seq_len=VALUE" in done.output
    done = CliRunner().invoke(cli, ["plan", "gpt2", "--gpus", "T4", "--global-batch", "8", "--sequence", "512"])
    assert done.exit_code == 2 and "--fixed" not in done.output


def test_an_interleaved_pipelines_picture_leaves_out_what_cannot_be():
    plan = lab.plan("meta-llama/Llama-3.1-70B", "512xH100-80GB", 1024, stack="megatron", fixed={"seq_len": 4096},
                    executor=NotSimulated("Not here."))  # fmt: skip
    assert plan.best.run.virtual_stages > 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpus": "8xT5"}, "unknown GPU 'T5'"),
        ({"gpus": "12xT4"}, "nodes have 8 GPUs"),
        ({"gpus": "0xT4"}, "at least one GPU"),
        ({"global_batch": 0}, "global_batch=0 is too small"),
        ({"tokens": 0}, "tokens=0 is too small"),
        ({"within": 3.0}, "needs tokens="),
        ({"method": "half"}, "method='half' is not one of"),
        ({"goal": "best"}, "goal='best' is not one of"),
        ({"allow": ("magic",)}, "allow='magic' is not one of"),
        ({"fixed": {"sequence": 1}}, "fixed='sequence'.* fields are .*seq_len"),
        ({"fixed": {"optimizer": "sgd"}, "allow": ("optimizer",)}, "give one of the two"),
        ({"fixed": {"lora": lab.LoRA()}}, "lora.* method='full'"),
        ({"fixed": {"quantization": "nf4"}}, "quantization='nf4' contradicts method='full'"),
        ({"fixed": {"quantization": "gptq"}, "method": "qlora"}, "quantization='gptq': no file that plan writes"),
        ({"gpus": "8xT4", "fixed": {"dp": 3}}, "dp=3 and gpus='8xT4' contradict each other"),
        ({"gpus": "8xT4", "fixed": {"dp": 2, "tp": 2, "pp": 1, "cp": 1}}, "4 ranks are not 8 GPUs"),
        ({"fixed": {"micro_batch": 3}}, "micro_batch=3 and global_batch=8 contradict each other"),
        ({"fixed": {"zero": 3, "offload": None}}, "zero=3 .*dp=1"),
        ({"gpus": "8xT4", "global_batch": 7, "fixed": {"tp": 1, "pp": 1, "cp": 1}}, "no number of data-parallel ranks"),
        ({"fixed": {"seq_len": 4096}}, "seq_len=4096"),
        ({"fixed": {"precision": "bf16"}}, "T4 has no bf16 units"),
        ({"stack": "nemo"}, "unknown stack 'nemo'"),
        ({"stack": "deepspeed", "method": "lora"}, "contradict each other: deepspeed has no lora"),
        ({"stack": "megatron", "method": "lora"}, "contradict each other: Megatron-LM's arguments have no lora"),
        ({"tokens": "many"}, "tokens='many' is a str"),
        ({"gpus": 8}, "gpus=8 is a int"),
    ],
)
def test_bad_input_is_a_sentence(asked, says):
    question = {"gpus": "T4", "global_batch": 8, **asked}
    with pytest.raises((lab.SpecError, lab.UnknownName), match=says):
        lab.plan("gpt2", question.pop("gpus"), question.pop("global_batch"), **question)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "gpt2", "--gpus", "T5", "--global-batch", "8"], 2),
        (["plan", "gpt2", "--gpus", "T4", "--global-batch", "8", "--fixed", "seq_len"], 2),
        (["plan", "meta-llama/Llama-3.1-8B", "--gpus", "T4", "--global-batch", "8", "--json"], 1),
        (["plan", "gpt2", "--gpus", "T4", "--global-batch", "8", "--tokens", "0"], 2),
        (["plan", "gpt2", "--gpus", "T4", "--global-batch", "8", "--tokens", "10000000000", "--within", "1"], 1),
        (["plan", "gpt2", "--gpus", "8xT4", "--global-batch", "8", "--fixed", "dp=3"], 2),
        (["fix", "gpt2"], 2),
        (["fix", "gpt2", "--gpu", "T4", "--micro-batch", "8"], 0),
    ],
)
def test_the_commands_exit_codes(words, code):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == code
    assert "Traceback" not in done.output


def test_fix_of_a_text_that_is_no_model_says_what_it_reads():
    done = CliRunner().invoke(cli, ["fix", "ValueError: Attempting to unscale FP16 gradients."])
    assert done.exit_code == 2 and "not a message of torch.OutOfMemoryError" in done.output
    done = CliRunner().invoke(cli, ["fix", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"])
    assert done.exit_code == 0


@pytest.mark.parametrize("given", ["stdin", "argument", "log"])
def test_fix_reads_torchs_message(given, tmp_path):
    message = (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 14.00 GiB total capacity; 12.00 GiB already allocated; "
        "0.50 GiB free; 13.00 GiB reserved in total by PyTorch)"
    )
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{message}\n", encoding="utf-8")
    words = {"stdin": [], "argument": [message], "log": [str(log)]}[given]
    done = CliRunner().invoke(cli, ["fix", *words], input=message if given == "stdin" else None)
    assert done.exit_code == 0 and "expandable_segments" in done.output
