"""Chat templates and tokenizers of checkpoints, at work in processes of their own."""
