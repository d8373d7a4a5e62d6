"""What the fields of a run mean, in words: the help of the command line and of the calculator."""

HELP = {
    "micro_batch": "Sequences per forward pass on each GPU.",
    "seq_len": "Tokens per sequence.",
    "precision": "Dtype of weights and arithmetic: autocast-* keeps the weights in fp32; mixed-* keeps 16-bit weights "
    "and an fp32 copy in the optimizer; bf16 and fp16 keep only 16-bit weights.",
    "optimizer": "Optimizer.",
    "checkpointing": "Activations to recompute in the backward pass.",
    "attention": "Attention kernel.",
    "accumulation": "Micro-batches per optimizer step.",
    "quantization": "Dtype of the frozen base weights; needs --lora.",
    "double_quant": "Quantize the scales of nf4 weights too (bnb_4bit_use_double_quant).",
    "half_layers": "Frozen layers whose weights stay in 16 bits; needs --lora and an autocast-* precision. embeddings "
    "= the embedding and the head of a quantized model; all = every frozen layer, as when a model is loaded in bf16 "
    "and trained with the Trainer's bf16=True; none = every unquantized layer is in fp32, as after peft's "
    "prepare_model_for_kbit_training.",
    "zero": "ZeRO stage over the --dp ranks; 2 and 3 are implemented with FSDP. One of 0, 1, 2, 3.",
    "dp": "Data-parallel ranks.",
    "tp": "Tensor-parallel ranks.",
    "pp": "Pipeline stages.",
    "schedule": "Pipeline schedule.",
    "virtual_stages": "Virtual stages per pipeline rank; more than 1 interleaves 1F1B.",
    "cp": "Context-parallel ranks.",
    "ep": "Expert-parallel ranks, which are part of the --dp ranks; must be a divisor of --dp.",
    "expert_imbalance": "Tokens of the busiest expert-parallel rank, divided by the mean of all ranks, from 1 "
    "(even) to --ep.",
    "dp_replicate": "HSDP: number of copies of the sharded model; must be a divisor of --dp.",
    "sync_each_batch": "FSDP: reduce gradients after each micro-batch; otherwise, only after the last.",
    "reduce_dtype": "Dtype of FSDP's gradient reduction; needs --zero 2 or 3 and --precision mixed-bf16.",
    "sequence_parallel": "Shard the activations of norms and dropout over the --tp ranks.",
    "loss_parallel": "Compute the loss on logits sharded over the --tp ranks; otherwise, gather the logits first.",
    "offload": "States to keep in host memory.",
    "compile": "Run under torch.compile.",
    "kernels": "Fused kernels: Liger Kernel, or only a fused cross-entropy loss or a fused RMSNorm.",
    "stack": "Training code: transformers, torchtitan, megatron, torchtune, deepspeed, litgpt or nanotron. The choice "
    "can change the defaults of other options. A stack's own options follow a colon: torchtitan:ac=full. An unknown "
    "stack or option prints the list of valid ones.",
    "fp8": "Recipe for fp8 matmuls; needs --compile and --precision bf16 or mixed-bf16.",
    "images": "Images in each sequence of a vision-language model; --seq-len counts their tokens.",
    "pixels": "Size of each image before the processor resizes it: a number of pixels, or HEIGHTxWIDTH.",
    "num_labels": "Train a sequence classifier of this many classes instead of a language model.",
    "method": "Training method. --micro-batch counts pairs for dpo, orpo and reward, and completions for ppo and grpo.",
    "reference": "Where the reference scores of dpo, kto, ppo and grpo come from: kept = a second model in GPU memory; "
    "offloaded = a second model in host memory, on the GPU only while it computes; precomputed = computed before "
    "training; adapter = the model with its adapter switched off.",
    "teacher": "Model to distill from, a name or a path as for MODEL; default: a model as large as MODEL.",
    "completion_len": "Tokens to generate; included in --seq-len. Required by ppo and grpo.",
    "mean_completion_len": "Mean tokens of a completion in ppo and grpo; --completion-len is then the maximum. "
    "Default: all completions have --completion-len tokens.",
    "generations": "Completions per prompt in ppo and grpo. The number of completions per update, which is "
    "--micro-batch times --accumulation times --dp, must be a multiple of it.",
    "gpu_memory_utilization": "Share of the GPU's memory that the generating engine of ppo and grpo uses.",
    "lora": "Train LoRA adapters of this rank; all other weights are frozen.",
    "lora_targets": "Names of the linear layers that get an adapter, separated by commas; all-linear selects all but "
    "the head.",
    "lora_alpha": "Numerator of the adapters' scale, alpha / rank; default: 2 * rank.",
    "lora_dropout": "Dropout probability before the adapters.",
    "lora_autocast_adapter_dtype": "Keep adapters in fp32 even if the base weights are in 16 bits, as peft does.",
    "batch": "Prompts per batch.",
    "prompt_len": "Tokens per prompt.",
    "new_tokens": "Tokens to generate after each prompt.",
    "weights": "Dtype of the weights.",
    "kv": "Dtype of the KV cache.",
}
