"""When an estimate derives a trace."""

import llmlab as lab
from llmlab.simulation import deriving, tracing

TEXT = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 4096,
        "pad_token_id": 0}  # fmt: skip
OLMO = {"model_type": "olmo2", **TEXT}


def test_where_nothing_can_be_derived_a_plain_transformer_answers_and_the_reason_is_printed(monkeypatch, capsys):
    def none(*_):
        raise tracing.Untraceable("the formulas give 2 bytes where a simulation has 3")

    monkeypatch.setattr(tracing, "derived", none)
    monkeypatch.setattr(deriving, "_without", set())
    report = lab.estimate(OLMO, lab.Training(precision="bf16"), "A100-80GB")
    assert "plain-transformer" in [note.code for note in report.notes]
    assert "2 bytes where a simulation has 3. The estimate is that of a plain transformer" in capsys.readouterr().err
