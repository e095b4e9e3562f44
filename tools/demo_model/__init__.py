"""The demo model: its text, its tokenizer, its training and its evaluation."""
