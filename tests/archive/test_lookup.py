"""Records are found by what model, run and GPU mean, not by how they are spelled."""

import subprocess
import sys

import pytest

from llmlab.archive import PLAN, Figure, OperatorRecord, figure, records, store
from llmlab.archive.store import PACKAGE
from llmlab.base.errors import SpecError, UnknownName
from llmlab.report import Report
from llmlab.specs.model import model
from llmlab.specs.run import Inference, LoRA, Training


def put(folder, *reports):
    store.merge(folder / "m.json", "reports", [r.to_dict() for r in reports], repr)


def report(model="gpt2", gpu="T4", date="2026-01-01", **more):
    environment = {"date": date} if date else {"torch": "2.13.0"}
    values = {"source": "measured", "run": Training(), "environment": environment, **more}
    return Report(model=model, gpu=gpu, **values)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"])
def test_a_models_aliases_find_its_records(name):
    found = records(name, gpu="T4", folder=PACKAGE)
    assert {r.model for r in found} == {"Qwen/Qwen2.5-1.5B-Instruct"}  # the name stays as published


def test_a_spec_finds_what_its_name_finds():
    assert records(model("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), folder=PACKAGE) == records("TinyLlama-1.1B-Chat-v1.0")


@pytest.mark.parametrize("name", ["T4", "tesla t4", "NVIDIA T4"])
def test_a_cards_names_find_its_records(name):
    assert records(gpu=name, folder=PACKAGE) == [row for row in records(folder=PACKAGE) if row.gpu == "T4"] != []


def test_a_changed_config_finds_neither_the_presets_records_nor_another_changed_ones(tmp_path):
    config = model("TinyLlama/TinyLlama-1.1B-Chat-v1.0").config
    assert records({**config, "num_hidden_layers": 3}) == []
    three = {**config, "num_hidden_layers": 3, "_name_or_path": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
    assert model(three).name.endswith("(changed)") and model(config | {"num_hidden_layers": 4}).name == "custom-llama"
    put(tmp_path, report(model(three).name), report("custom-llama"))
    assert records({**three, "num_hidden_layers": 4}, folder=tmp_path) == []
    assert records(config | {"num_hidden_layers": 5}, folder=tmp_path) == []


def test_a_run_must_agree_in_every_field():
    lora = LoRA(rank=32, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    same = {"micro_batch": 4, "seq_len": 1024, "precision": "fp16", "checkpointing": "full", "attention": "eager"}
    assert len(records("SmolLM2-1.7B", Training(**same, lora=lora), "T4", folder=PACKAGE)) == 3
    assert records("SmolLM2-1.7B", Training(**{**same, "micro_batch": 2}, lora=lora), folder=PACKAGE) == []
    assert records("SmolLM2-1.7B", Training(**same), folder=PACKAGE) == []
    assert records("SmolLM2-1.7B", Inference(), folder=PACKAGE) == []


def test_newest_first_and_undated_last(tmp_path):
    dates = ["2026-03-01", None, "2026-05-01", "2025-12-31"]
    put(tmp_path, *(report(date=date) for date in dates))
    assert [r.environment.get("date") for r in records(folder=tmp_path)] == [
        "2026-05-01", "2026-03-01", "2025-12-31", None,
    ]  # fmt: skip


def test_the_users_own_records_stand_beside_the_packages(user_records):
    mine = report("HuggingFaceTB/SmolLM2-1.7B", date="2030-01-01")
    put(user_records, mine)
    found = records("SmolLM2-1.7B", gpu="T4")
    assert found[0] == mine and len(found) > 12
    assert records(source="measured", gpu="T4", folder=user_records) == [mine]


def test_a_model_that_is_no_preset_is_found_by_its_own_name(tmp_path):
    put(tmp_path, report("me/my-model"), report("me/other"))
    assert [r.model for r in records("me/my-model", folder=tmp_path)] == ["me/my-model"]
    assert records("me/my-model", source="published", folder=tmp_path) == []
    assert records("gpt2", folder=tmp_path) == []  # a preset without records


def test_a_model_that_is_neither_preset_nor_recorded_is_refused(tmp_path):
    put(tmp_path, report("me/my-model"))
    with pytest.raises(UnknownName, match=r"unknown model 'me/my-modell'\. Nearest: me/my-model\b.*`llmlab models`"):
        records("me/my-modell", folder=tmp_path)
    with pytest.raises(UnknownName, match="Nearest: gpt2"):
        records("gpt3")


def test_a_card_that_is_not_in_the_table_is_found_by_its_drivers_name(tmp_path):
    put(tmp_path, report(gpu="NVIDIA Frobnicator 9"), report(gpu="cpu"), report(gpu=None))
    assert len(records(gpu="NVIDIA Frobnicator 9", folder=tmp_path)) == 1
    assert len(records(gpu="CPU", folder=tmp_path)) == 2  # a report of a CPU names no GPU
    assert len(records(folder=tmp_path)) == 3


def test_names_that_cannot_be_are_refused():
    with pytest.raises(UnknownName, match="T44"):
        records(gpu="T44")
    with pytest.raises(SpecError, match="source='guessed' is not one of"):
        records(source="guessed")


def test_no_records_is_an_empty_list(tmp_path):
    assert records(folder=tmp_path / "absent") == []


def test_an_unknown_figure_names_the_nearest():
    with pytest.raises(UnknownName, match=r"Nearest: zero-7\.5b-mixed-adam"):
        figure("zero-7b-mixed-adam")
    with pytest.raises(UnknownName, match="stage 3"):
        figure("zero-7.5b-mixed-adam")["stage 4"]
    with pytest.raises(SpecError, match="has several values"):
        _ = figure("zero-7.5b-mixed-adam").value


def test_a_figure_without_source_or_numbers_cannot_be():
    good = {"key": "k", "what": "w", "setup": "s", "values": {"x": 1}, "unit": "bytes", "source": "paper"}
    Figure(**good)
    for field, value in (("source", ""), ("unit", None), ("values", {}), ("values", {"x": "12"})):
        with pytest.raises(SpecError, match="figure 'k'"):
            Figure(**{**good, field: value})


def test_an_operator_record_has_si_units_and_a_citation():
    good = {
        "operator": "rope", "provider": "liger", "mode": "full", "metric": "time", "unit": "s", "value": 0.1,
        "sizes": {}, "options": {}, "dtype": None, "gpu": "T4", "environment": {}, "citation": "somebody",
    }  # fmt: skip
    OperatorRecord(**good)
    for field, value in (("unit", "ms"), ("metric", "speed"), ("mode", "sideways"), ("citation", "")):
        with pytest.raises(SpecError):
            OperatorRecord(**{**good, field: value})


def test_the_plan_asks_only_for_what_the_models_can():
    from llmlab.specs.check import check

    for item in PLAN:
        check(model(item.model), item.run)
    assert len({(item.model, item.run) for item in PLAN}) == len(PLAN)


def test_a_lookup_needs_no_torch():
    lookup = "from llmlab.archive import figures, records; records(); figures()"
    code = f"import sys; {lookup}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


