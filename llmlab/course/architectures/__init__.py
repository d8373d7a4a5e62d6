"""Model architectures from scratch, those that the book trains: GPT-2, Llama 3, and a small trained Llama."""
