"""The models that the book trains, from scratch: GPT-2, Llama 3, and a small trained Llama."""
