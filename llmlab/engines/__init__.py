"""Settings of the engines and trainers that run a Training: written from its fields, and read back as its fields."""
