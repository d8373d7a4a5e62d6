"""A plan: every candidate holds the global batch, fits by its simulation, and says why it lost."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.cli.main import cli
from llmlab.planning.confirm import NotSimulated
from llmlab.planning.files.write import program
from llmlab.planning.machines import machines
from llmlab.planning.nearest import fitting
from llmlab.planning.search import LATE, NO_PROGRAM
from llmlab.planning.space import Question, shapes, shares
from llmlab.plots.pareto import CHOSEN, REFUTED

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    with ThreadPoolExecutor(1) as one:
        return lab.plan(TINY, "4xA100-80GB", 16, fixed={"seq_len": 128, "pp": 1}, tokens=10**9, executor=one)


def test_a_plan_holds_the_batch_and_is_confirmed(tiny):
    assert len(tiny) >= 3 and tiny.best is tiny[0]
    for candidate in tiny:
        assert candidate.run.global_batch == 16 and candidate.run.world_size == 4
        assert candidate.simulation is not None or candidate.unconfirmed
        assert candidate.simulation is None or candidate.simulation.outcome != "out of memory"
    assert any(candidate.simulation for candidate in tiny)


@pytest.mark.parametrize(("stack", "method"), [("torchtune", "full"), ("torchtune", "lora"), ("litgpt", "lora")])
def test_a_stack_that_trains_in_half_is_planned_in_half(stack, method):
    plan = lab.plan(TINY, "4xA100-80GB", 16, method=method, fixed={"seq_len": 128}, stack=stack,
                    executor=NotSimulated("not asked"))  # fmt: skip
    assert plan.best.run.precision == "bf16" and plan.best.run.stack.name == stack
    assert (plan.best.run.lora is not None) == (method == "lora")


@pytest.mark.parametrize(("fixed", "optimizer"), [({}, "adamw-8bit"), ({"optimizer": "adamw"}, "adamw")])
def test_a_plan_leaves_to_its_stack_what_is_not_fixed(fixed, optimizer):
    plan = lab.plan(TINY, "A100-80GB", 4, fixed={"seq_len": 128, **fixed}, stack="torchtune",
                    executor=NotSimulated("not asked"))  # fmt: skip
    assert {each.run.optimizer for each in plan} == {optimizer}
    assert {each.run.checkpointing for each in plan.seen} == {None, "full"}


def test_a_plan_leaves_out_what_of_a_stack_is_not_described():
    """torchtitan's experts without FSDP2."""
    mixed = {**TINY, "model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    with ThreadPoolExecutor(1) as one:
        plan = lab.plan(mixed, "2xA100-80GB", 2, fixed={"seq_len": 128}, stack="torchtitan", executor=one)
    assert len(plan) and all(each.run.zero for each in plan)


def test_the_fastest_is_first_and_the_others_say_why_not(tiny):
    seconds = [candidate.report.step_seconds for candidate in tiny]
    assert seconds == sorted(seconds)
    assert tiny.best.lost == "" and all(candidate.lost for candidate in tiny[1:])
    assert tiny.best.days(10**9) == pytest.approx(10**9 / tiny.best.report.tokens_per_second / 86_400)


def test_the_cheapest_plan_has_one_run_of_each_number_of_a_card():
    with ThreadPoolExecutor(1) as one:
        plan = lab.plan(TINY, "2xT4", 16, goal="cheapest", fixed={"seq_len": 128, "compile": False}, executor=one)
    assert plan.gpus == "any GPU with a price, up to 2"
    machines_ = [str(each.machines) for each in plan]
    assert len(set(machines_)) == len(machines_) and len({each.machines.gpu.name for each in plan}) > 1
    prices = [each.usd_per_billion_tokens for each in plan]
    assert prices == sorted(prices) and plan[1].lost
    assert "GPUs" in str(plan)


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


@pytest.mark.parametrize(("gpus", "within"), [("T4", None), ("H100-80GB", None), ("H100-80GB", 25)])
def test_every_candidate_is_counted_once(gpus, within):
    model, fixed = lab.model("meta-llama/Llama-3.2-1B"), {"seq_len": 2048}
    question, where = Question(model, 64, fixed=fixed), machines(gpus)
    every = sum(len(list(shares(question, where, shape["dp"]))) for shape in shapes(question, where))
    plan = lab.plan(model, gpus, 64, fixed=fixed, tokens=10**11, within=within, executor=NotSimulated("Not here."))
    assert plan.tried + plan.cut == every == 252
    assert bool(plan.cuts.get(LATE)) == bool(within)


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


def test_where_nothing_fits_the_nearest_that_does_is_named():
    plan = lab.plan("meta-llama/Llama-3.1-8B", "T4", 8)
    assert not plan and plan.best is None
    directions = {each.direction: each for each in plan.nearest}
    assert set(directions) == {"More GPUs", "A GPU with more memory", "A smaller model", "Another method"}
    assert directions["More GPUs"].run.offload  # not even eight T4s hold it otherwise
    assert directions["Another method"].run.lora and str(directions["A smaller model"]).endswith("for 10^9 tokens).")
    for each in plan.nearest:
        assert each.report.outcome == "fits" and each.report.step_seconds
    assert directions["A GPU with more memory"].machines.gpu.memory > lab.gpu("T4").memory
    assert lab.model(directions["A smaller model"].model).parameters < lab.model("meta-llama/Llama-3.1-8B").parameters


def test_where_no_single_card_is_enough_more_of_a_larger_one_are():
    fixed = {"seq_len": 2048, "compile": False, "offload": None, "checkpointing": "full"}
    plan = lab.plan("meta-llama/Llama-3.1-70B", "T4", 16, fixed=fixed)
    directions = {each.direction: each.machines for each in plan.nearest}
    found = directions["More GPUs with more memory"]
    assert "A GPU with more memory" not in directions and found.total > 1 and found.gpu.memory > lab.gpu("T4").memory


def test_where_the_largest_card_is_too_small_no_smaller_one_is_searched(monkeypatch):
    asked = []

    def counted(question, where):
        asked.append(where)
        return fitting(question, where)

    monkeypatch.setattr("llmlab.planning.nearest.fitting", counted)
    whole = {"zero": 0, "tp": 1, "pp": 1}  # of a 70B on each GPU
    plan = lab.plan("meta-llama/Llama-3.1-70B", "T4", 8, fixed=whole, executor=NotSimulated("Not here."))
    assert {each.direction for each in plan.nearest} == {"A smaller model"}
    larger = [where.gpu for where in asked if where.gpu.name != "T4"]
    assert larger and all(card.memory > lab.gpu("B200").memory for card in larger)


def test_more_gpus_and_shorter_sequences_are_named_too():
    plan = lab.plan("meta-llama/Llama-3.1-8B", "H100-80GB", 8, fixed={"seq_len": 32768, "offload": None})
    directions = {each.direction: each for each in plan.nearest}
    more = directions["More GPUs"].machines
    question = Question(lab.model("meta-llama/Llama-3.1-8B"), 8, fixed={"seq_len": 32768, "offload": None})
    assert more.total > 1 and fitting(question, more)
    assert not fitting(question, machines(f"{more.total // 2}xH100-80GB"))
    adapters = lab.plan("meta-llama/Llama-3.1-8B", "T4", 8, method="qlora", fixed={"seq_len": 16384})
    shorter = next(each for each in adapters.nearest if each.direction == "Shorter sequences")
    assert shorter.run.seq_len < 16384 and shorter.run.seq_len * shorter.run.global_batch == 8 * 16384


def test_a_deadline_that_nobody_meets_is_said_with_the_fastest():
    plan = lab.plan("gpt2", "T4", 8, tokens=10**10, within=1.0)
    assert not plan and plan.problem.startswith("Nothing finishes within 1 day")
    more = next(each for each in plan.nearest if each.direction == "Another GPU")
    assert 10**10 / more.report.tokens_per_second <= 86_400 and plan.cuts[LATE] > 0


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


def test_fix_reads_torchs_message_from_stdin():
    message = (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 14.00 GiB total capacity; 12.00 GiB already allocated; "
        "0.50 GiB free; 13.00 GiB reserved in total by PyTorch)"
    )
    done = CliRunner().invoke(cli, ["fix"], input=message)
    assert done.exit_code == 0 and "expandable_segments" in done.output


def test_what_a_plan_is_made_of_is_shown_on_a_line():
    best = lab.plan("gpt2", "T4", 8, fixed={"seq_len": 512}, executor=NotSimulated("Not here.")).best
    for shown in map(repr, (best, best.machines, best.machines.gpu, best.report, lab.model("gpt2"))):
        assert "\n" not in shown and len(shown) < 200, shown
