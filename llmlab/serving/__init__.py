"""What serving a model costs: memory as the engine divides it, time to the first and to each next token, price."""
