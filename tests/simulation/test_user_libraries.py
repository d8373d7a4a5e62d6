"""Hugging Face, accelerate, peft and bitsandbytes inside `lab.simulator`, as their documentation uses them."""

import warnings

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")

transformers = pytest.importorskip("transformers")
D, FF, VOCAB, LAYERS = 64, 128, 256, 2
SIZES = {"vocab_size": VOCAB, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
LINEARS = LAYERS * (2 * D * D + 2 * D * D // 2 + 3 * D * FF)  # q, o; k, v; gate, up, down


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    llama().save_pretrained(path)
    return str(path)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(0, VOCAB, (32,))
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def blocks(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


def trained(model: nn.Module, out: object, **options: object) -> transformers.Trainer:
    arguments = {"max_steps": 2, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
                 "per_device_train_batch_size": 2, **options}  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(out), **arguments),
        train_dataset=Tokens(), eval_dataset=Tokens(),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_from_pretrained_places_the_weights_and_holds_their_bytes(saved):
    for place in ("cuda", {"": 0}):
        with simulator("T4") as sim:
            model = transformers.AutoModelForCausalLM.from_pretrained(saved, device_map=place, dtype=torch.float16)
            assert model.device == torch.device("cuda", 0) and model.dtype == torch.float16
            tensors = [*model.parameters(), *model.buffers()]
            assert sim.allocated == blocks(*(each.numel() * each.element_size() for each in tensors))
            ids = torch.randint(0, VOCAB, (2, 16), device=model.device)
            assert model(input_ids=ids, labels=ids).loss.is_cuda


@pytest.mark.parametrize("options", [
    {"fp16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0},
    {"bf16": True, "optim": "adamw_torch_fused", "eval_strategy": "steps", "eval_steps": 1, "tf32": True},
    {"optim": "adafactor", "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"optim": "adamw_8bit", "save_strategy": "steps", "save_steps": 1},
])  # fmt: skip
def test_trainer_takes_its_steps(tmp_path, options):
    with simulator("A100-40GB") as sim:
        trainer = trained(llama(), tmp_path, **options)
        assert next(trainer.model.parameters()).is_cuda and len(trainer.optimizer.state) == 21
        assert trainer.state.global_step == 2
        assert sim.peak_allocated > sum(each.numel() * 4 for each in trainer.model.parameters())
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("optimizer.pt"))


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@torch.no_grad()
def test_layers_off_the_card_are_there_while_they_run():
    accelerate = pytest.importorskip("accelerate")
    layer, most = 4 << 20, {}

    def pair():
        return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))

    for places in ({"": 0}, {"0": 0, "1": "cpu"}, None):
        with simulator("T4") as sim:
            model = pair()
            if places is None:
                accelerate.cpu_offload(model, execution_device=torch.device("cuda"))
            else:
                accelerate.dispatch_model(model, places, main_device=0)
            before = sim.allocated
            x = torch.ones(2, 1024, device="cuda")
            model(x)
            most[str(places)] = before, sim.peak_allocated
    (whole, peak), (half, of_half), (none, of_none) = most.values()
    assert (whole, half, none) == (2 * layer, layer, 0)
    assert peak == of_half and of_none == peak - layer


@pytest.mark.parametrize(("name", "states"), [("LARS", 1), ("LAMB", 2), ("Lion", 1)])
def test_bitsandbytes_optimizers_hold_their_states_also_where_they_read_a_norm(name, states):
    """LARS and LAMB scale by the parameter's norm, which only values say, and on which no memory depends."""
    optimizers = pytest.importorskip("bitsandbytes").optim
    with simulator("T4") as sim:
        weight = nn.Parameter(torch.ones(1 << 20, device="cuda"))
        optimizer = getattr(optimizers, name)([weight], lr=1e-3, **({"momentum": 0.9} if name == "LARS" else {}))
        (weight * weight).sum().backward()
        held = sim.allocated
        optimizer.step()
        assert 0 <= sim.allocated - held - states * 4 * weight.numel() <= 4096  # norms of the update
        assert sim.notes == ()


def test_accelerate_prepares_accumulates_and_forgets_the_card():
    accelerate = pytest.importorskip("accelerate")
    with simulator("T4"):
        accelerator = accelerate.Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(Tokens(), batch_size=2)
        )
        for batch in loader:
            with accelerator.accumulate(model):
                assert batch["input_ids"].is_cuda
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert not optimizer.step_was_skipped and len(optimizer.state) == 21
        assert f"{accelerator.gather(loss.detach()).mean().item():.3f}" == "?"
    assert accelerate.Accelerator().device.type == "cpu"


def test_qlora_from_a_checkpoint_holds_half_a_byte_a_weight(saved):
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    wanted = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    with simulator("A100-40GB") as sim:
        model = transformers.AutoModelForCausalLM.from_pretrained(saved, quantization_config=wanted, device_map="auto")
        linear = model.model.layers[0].mlp.up_proj.weight
        assert linear.is_cuda and linear.numel() == D * FF // 2 and linear.dtype == torch.uint8
        kept = sum(each.numel() * each.element_size() for each in model.parameters() if each.dtype != torch.uint8)
        scales = LINEARS // 64 * 4  # one fp32 a block of 64 weights
        expected = LINEARS // 2 + scales + kept
        assert expected <= sim.allocated < expected + 512 * 4 * 14 + 512 * 20  # code books, and rounding to blocks
        model = peft.prepare_model_for_kbit_training(model)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        ids = torch.randint(0, VOCAB, (2, 16), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert len(optimizer.state) == 2 * 2 * LAYERS


def test_paged_states_are_not_the_allocators():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()  # it knows parameters by id, also dead ones

    def held(kind: type) -> int:
        with simulator("T4") as sim:
            model = nn.Linear(1024, 1024, bias=False).cuda()
            optimizer = kind(model.parameters())
            model(torch.randn(2, 1024, device="cuda")).sum().backward()
            optimizer.step()
        return sim.allocated

    assert held(bitsandbytes.optim.AdamW8bit) - held(bitsandbytes.optim.PagedAdamW8bit) == 2 * 1024 * 1024


def test_generate_comes_to_its_greatest_length_and_decodes(saved):
    with simulator("T4"):
        model = transformers.AutoModelForCausalLM.from_pretrained(saved).to("cuda").eval()
        prompt = torch.arange(1, 17)[None].expand(2, 16).cuda()
        searches = {"do_sample": False}, {"do_sample": True, "top_p": 0.9}, {"cache_implementation": "static"}
        with warnings.catch_warnings(record=True) as said:
            for options in searches:
                out = model.generate(prompt, max_new_tokens=5, eos_token_id=2, pad_token_id=0, **options)
                assert out.shape == (2, 21) and len(out[0].tolist()) == 21
    assert len([each for each in said if "generate()" in str(each.message)]) == 1  # of the line, not of each call


def test_generated_tokens_size_what_a_reward_reads(saved):
    """As TRL's GRPO: mask what follows the first end of sequence, and take the tokens before it to the host."""
    with simulator("A100-40GB"):
        model = transformers.AutoModelForCausalLM.from_pretrained(saved).cuda()
        prompt = torch.arange(3, 15).view(2, 6).cuda()
        with warnings.catch_warnings(record=True):
            drawn = model.generate(prompt, max_new_tokens=5, do_sample=True, eos_token_id=0, pad_token_id=1)[:, 6:]
        ends = torch.isin(drawn, torch.tensor([0], device="cuda"))
        first = torch.full((2,), 5, device="cuda")
        first[ends.any(dim=1)] = ends.int().argmax(dim=1)[ends.any(dim=1)]
        mask = torch.arange(5, device="cuda").expand(2, -1) <= first[:, None]
        kept = [tokens[each].tolist() for tokens, each in zip(drawn.cpu(), mask.cpu(), strict=True)]
    assert [len(each) for each in kept] == [5, 5] and not {0, 1} & {*kept[0], *kept[1]}


def test_8_bit_layers_are_made_without_memory_as_accelerate_makes_them():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from accelerate import init_empty_weights

    with simulator("A100-40GB"), init_empty_weights():
        layers = bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False), bitsandbytes.nn.Linear4bit(8, 8)
    assert all(each.weight.is_meta for each in layers)
    assert not layers[0].weight.has_fp16_weights and layers[1].weight.quant_type == "fp4"


@pytest.mark.parametrize("options", [
    {"num_beams": 3}, {"num_beams": 2, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 2, "do_sample": True, "early_stopping": "never", "length_penalty": 2.0},
])  # fmt: skip
def test_beam_search_comes_to_its_greatest_length(options):
    with simulator("T4"):
        model = llama().cuda().eval()
        prompt = torch.arange(1, 17, device="cuda").expand(2, 16)
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, eos_token_id=2, pad_token_id=0, **options
        )
        assert out.shape == (2 * options.get("num_return_sequences", 1), 20)


def test_adapters_are_saved_and_loaded_in_memory(tmp_path):
    peft = pytest.importorskip("peft")
    with simulator("T4"):
        model = peft.get_peft_model(llama().cuda(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
        with pytest.warns(UserWarning, match="is kept in memory"):
            model.save_pretrained(tmp_path)
        from safetensors.torch import load_file

        loaded = load_file(tmp_path / "adapter_model.safetensors", device="cuda")
        assert len(loaded) == 2 * LAYERS and all(each.is_cuda for each in loaded.values())
    assert not (tmp_path / "adapter_model.safetensors").exists()
