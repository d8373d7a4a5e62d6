"""The settings of the engines that run a Training: DeepSpeed, Accelerate, FSDP2."""
