"""From text on disk to batches of tokens: corpus, tokens, loader."""
