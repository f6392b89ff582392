"""A small, readable trainer built on `muon2_optax`: `python -m examples.pretrain`."""
