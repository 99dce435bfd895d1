"""Models of Hugging Face transformers: their checkpoints in, trained over the store, and out again."""
