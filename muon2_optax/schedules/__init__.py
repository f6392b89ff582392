"""Newton-Schulz coefficients: tables, the minimax generator, the fit."""
