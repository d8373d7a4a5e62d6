"""What the fields of a run mean, in words: the help of the command line and of the calculator."""

HELP = {
    "micro_batch": "Sequences per forward pass on each GPU.",
    "seq_len": "Tokens per sequence.",
    "precision": "Dtypes of the weights and of the arithmetic. autocast-* = weights in fp32, matmuls in 16 bits; "
    "mixed-* = weights in 16 bits, with an fp32 copy in the optimizer; fp32, fp16, bf16 = this dtype for both.",
    "optimizer": "Optimizer.",
    "checkpointing": "Activations that are recomputed in the backward pass.",
    "attention": "Attention kernel.",
    "accumulation": "Micro-batches per optimizer step.",
    "quantization": "Quantized dtype of the frozen base weights. This option requires --lora.",
    "double_quant": "Also quantize the scales of nf4 weights (bnb_4bit_use_double_quant).",
    "half_layers": "Frozen layers whose weights stay in 16 bits. This option requires --lora and an autocast-* "
    "precision. none = all unquantized layers are in fp32, which is what peft's prepare_model_for_kbit_training does; "
    "embeddings = the embedding and the head of a quantized model; all = every frozen layer, as in a model that is "
    "loaded in bf16 and trained with the Trainer's bf16=True.",
    "zero": "ZeRO stage over the --dp ranks. With --stack transformers, stages 2 and 3 use FSDP. One of 0, 1, 2, 3.",
    "dp": "Number of data-parallel ranks.",
    "tp": "Number of tensor-parallel ranks.",
    "pp": "Number of pipeline-parallel ranks.",
    "schedule": "Pipeline schedule.",
    "virtual_stages": "Virtual stages on each pipeline-parallel rank. Numbers above 1 select interleaved 1F1B.",
    "cp": "Number of context-parallel ranks.",
    "ep": "Number of expert-parallel ranks. These ranks are part of the --dp ranks, so their number must be a "
    "divisor of --dp. With --stack megatron, it must be a divisor of dp × cp × tp, divided by the ranks that share an "
    "expert.",
    "expert_imbalance": "Tokens of the busiest expert-parallel rank, divided by the mean of all ranks. The minimum is "
    "1 (all ranks have equally many tokens), and the maximum is the value of --ep. `lab.expert_imbalance` computes "
    "this number from the measured tokens of each expert.",
    "dp_replicate": "Number of copies of the sharded model (HSDP). This number must be a divisor of --dp.",
    "sync_each_batch": "Let FSDP reduce gradients after each micro-batch. With --no-sync-each-batch, FSDP reduces them "
    "only after the last micro-batch.",
    "reduce_dtype": "Dtype in which FSDP reduces gradients. fp16 and bf16 require --zero 2 or 3. bf16 also requires "
    "--precision bf16 or mixed-bf16, and fp16 requires --precision fp16 or mixed-fp16.",
    "sequence_parallel": "Shard the activations of norms and dropout over the --tp ranks.",
    "loss_parallel": "Compute the loss on logits that are sharded over the --tp ranks. With --no-loss-parallel, each "
    "rank gathers all logits first.",
    "offload": "Training states that are kept in host memory instead of GPU memory.",
    "compile": "Run the model under torch.compile.",
    "kernels": "Fused kernels. liger = the kernels of Liger Kernel; fused-loss = only a fused cross-entropy loss; "
    "fused-norm = only a fused RMSNorm.",
    "stack": "Library that trains the model: transformers, torchtitan, megatron, torchtune, deepspeed, litgpt or "
    "nanotron. This choice can change the defaults of other options. A colon separates the library from its own "
    "options: torchtitan:ac=full. If the library or its option is unknown, the error message lists the valid ones.",
    "fp8": "Recipe for fp8 matmuls. This option requires --compile and --precision bf16 or mixed-bf16.",
    "images": "Images in each sequence of a vision-language model. --seq-len includes the tokens of the images.",
    "pixels": "Size of each image before the model's processor resizes it. The size is a number of pixels, or "
    "HEIGHTxWIDTH.",
    "num_labels": "Train a sequence classifier with this number of classes instead of a language model.",
    "method": "Training method. --micro-batch counts sequences for most methods. For dpo, orpo and reward, "
    "--micro-batch counts pairs of sequences. For ppo and grpo, --micro-batch counts completions.",
    "reference": "Source of the reference model's log-probabilities in dpo, kto, ppo and grpo. kept = a second model "
    "in GPU memory; offloaded = a second model that is in host memory except during its forward pass; "
    "precomputed = log-probabilities that were computed before training; adapter = the trained model with its adapters "
    "switched off; none = the default.",
    "teacher": "Teacher model for the method distill: a name or a path, as for MODEL. Default: a model as large as "
    "MODEL.",
    "completion_len": "Tokens per sequence that ppo and grpo generate. Both methods require this option. --seq-len "
    "includes the generated tokens.",
    "mean_completion_len": "Mean number of tokens per completion in ppo and grpo. --completion-len is the maximum. "
    "Default: all completions have --completion-len tokens.",
    "generations": "Completions per prompt in ppo and grpo. This number must be a divisor of the completions per "
    "update (--micro-batch * --accumulation * --dp).",
    "gpu_memory_utilization": "Share of the GPU's memory that vLLM uses to generate completions in ppo and grpo.",
    "lora": "Train LoRA adapters of this rank, and freeze all other weights.",
    "lora_targets": "Names of the linear layers that get an adapter, separated by commas. all-linear = all linear "
    "layers except the head.",
    "lora_alpha": "Numerator of the adapters' scale, which is alpha / rank. Default: 2 * rank.",
    "lora_dropout": "Dropout probability at the input of the adapters.",
    "lora_autocast_adapter_dtype": "Keep adapters in fp32 even if the base weights are in 16 bits. This is the default "
    "of peft.",
    "batch": "Prompts per batch.",
    "prompt_len": "Tokens per prompt.",
    "new_tokens": "Tokens to generate after each prompt.",
    "weights": "Dtype of the weights.",
    "kv": "Dtype of the KV cache.",
}
