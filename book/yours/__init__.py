"""Your GPT, and the trainer that grows with the book: see README.md."""
