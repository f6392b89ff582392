"""A small regression with PyTorch's Muon for the matrix and AdamW for the rest."""

import torch

torch.manual_seed(0)
x = torch.randn(256, 16)
y = torch.sin(x @ torch.randn(16, 8) / 4)
up = torch.nn.Linear(16, 64, bias=False)
head = torch.nn.Linear(64, 8)

muon = torch.optim.Muon(up.parameters(), lr=1e-3, weight_decay=0.1)
adamw = torch.optim.AdamW(
    head.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1
)

losses = []
for _ in range(100):
    loss = torch.nn.functional.mse_loss(head(torch.nn.functional.gelu(up(x))), y)
    loss.backward()
    for optimizer in (muon, adamw):
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(loss))
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
