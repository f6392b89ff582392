"""Zero-shot evaluation: local tasks, and an adapter for lm-evaluation-harness."""
