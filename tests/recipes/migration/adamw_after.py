"""The same regression with Muon^2, from AdamW's rate and decay."""

import jax
import jax.numpy as jnp
import optax

import muon2_optax as m2

x = jax.random.normal(jax.random.key(0), (256, 16))
y = jnp.sin(x @ jax.random.normal(jax.random.key(1), (16, 8)) / 4)
params = {
    "up": {"kernel": jax.random.normal(jax.random.key(2), (16, 64)) / 4},
    "head": {
        "kernel": jax.random.normal(jax.random.key(3), (64, 8)) / 8,
        "bias": jnp.zeros(8),
    },
}


def loss_fn(params):
    hidden = jax.nn.gelu(x @ params["up"]["kernel"])
    outputs = hidden @ params["head"]["kernel"] + params["head"]["bias"][None, :]
    return jnp.mean((outputs - y) ** 2)


tx = m2.muon2(
    # AdamW's rate and decay fit this factor in long runs. AdamW's first hundred updates
    # are larger, up to its whole rate: five times, then, at the same rate x decay.
    optax.linear_schedule(5 * 3e-3, 0.0, 100),
    weight_decay=0.1 / 5,
    shape_scale="match_rms",
    nesterov=True,
    adam_learning_rate=optax.linear_schedule(3e-3, 0.0, 100),
    adam_b1=0.9,
    adam_b2=0.95,
    adam_weight_decay=0.1,
)
state = tx.init(params)


@jax.jit
def step(params, state):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(100):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
