"""Meshes from text, and models on eight devices that compute what one does."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples.config import ModelConfig
from examples.mesh import batch_sharding, constrain, make_mesh, param_shardings
from examples.models import Decoder
from examples.models.head import head_loss
from examples.options import UserError

VOCAB = 64


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", {"data": 8}),
        ("data=1", {"data": 1}),
        ("fsdp=4", {"fsdp": 4}),
        ("tensor=2,fsdp=4", {"fsdp": 4, "tensor": 2}),
        ("fsdp=-1,tensor=2", {"fsdp": 4, "tensor": 2}),
        ("data=2, expert=4", {"data": 2, "expert": 4}),
    ],
)
def test_meshes_from_text(text: str, shape: dict[str, int]) -> None:
    mesh = make_mesh(text)
    assert dict(mesh.shape) == shape
    assert tuple(mesh.shape) == tuple(shape)  # tensor last: on neighbours


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=2", "no axis 'model' .known: data, fsdp, expert, tensor"),
        ("fsdp", "want fsdp=NUMBER, at least 1 or -1 for the rest, got fsdp"),
        ("fsdp=two", "want fsdp=NUMBER"),
        ("fsdp=0", "want fsdp=NUMBER, at least 1 .* got fsdp=0"),
        ("fsdp=2,fsdp=2", "given twice"),
        ("fsdp=-1,data=-1", "only one axis can be -1"),
        ("fsdp=16", "takes 16 devices, here are 8"),
    ],
)
def test_errors(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_mesh(text)


def shapes(config: ModelConfig) -> Any:
    abstract = nnx.eval_shape(lambda: Decoder(config, VOCAB, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(abstract, nnx.Param))


def test_matrices_are_divided_both_ways_and_stacks_in_front() -> None:
    config = ModelConfig(model="moe_tiny", scan_layers=True)
    mesh = make_mesh("fsdp=2,expert=2,tensor=2")
    found = param_shardings(shapes(config), mesh)
    block = found["blocks"]
    assert found["embed"]["embedding"].spec == P("tensor", "fsdp")
    assert found["lm_head"]["kernel"].spec == P("fsdp", "tensor")
    assert found["final_norm"]["scale"].spec == P()
    assert block["attention"]["query"]["kernel"].spec == P(None, "fsdp", "tensor")
    assert block["attention"]["out"]["kernel"].spec == P(None, "tensor", "fsdp")
    assert block["mlp"]["experts"]["up"].spec == P(None, "expert", "fsdp", "tensor")
    assert block["mlp"]["router"]["kernel"].spec == P()


def test_what_an_axis_does_not_divide_stays_whole() -> None:
    config = ModelConfig(dim=24, heads=2, hidden=27)
    found = param_shardings(shapes(config), make_mesh("fsdp=4,tensor=2"))
    mlp = found["blocks"][0]["mlp"]
    assert mlp["gate"]["kernel"].spec == P("fsdp")
    assert mlp["down"]["kernel"].spec == P(None, "fsdp")


def test_batches_are_divided_over_all_but_tensor() -> None:
    mesh = make_mesh("data=2,expert=2,tensor=2")
    assert batch_sharding(mesh).spec == P(("data", "expert"))
    assert batch_sharding(make_mesh("tensor=2")).spec == P()


def test_constraints_need_a_mesh_to_act() -> None:
    x = jnp.ones((4, 6))
    assert constrain(x, "fsdp", "tensor") is x
    with jax.set_mesh(make_mesh("fsdp=4,tensor=2")):
        y = jax.jit(lambda x: constrain(x, "fsdp", "tensor"))(x)
        odd = jax.jit(lambda x: constrain(x, "tensor", "fsdp"))(x)
    assert y.sharding.spec == P("fsdp", "tensor")
    assert odd.sharding.spec in (P("tensor"), P("tensor", None))


def loss_and_grads(graphdef: Any, params: Any, tokens_BxM: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        x, aux, _ = model.features(tokens_BxM[:, :-1])
        return head_loss(x, model.head(), tokens_BxM[:, 1:], 2) + aux

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize(
    "scan_layers", [pytest.param(False, marks=pytest.mark.slow), True]
)
@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("gpt_tiny", "data=2,fsdp=2,tensor=2"),
        pytest.param("llama_tiny", "fsdp=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("moe_tiny", "fsdp=4,expert=2", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_computes_what_one_device_does(
    model: str, axes: str, scan_layers: bool
) -> None:
    config = ModelConfig(
        model=model, dim=32, heads=2, hidden=64, seq_len=16, scan_layers=scan_layers,
        capacity_factor=1.5,
    )  # fmt: skip
    graphdef, state = nnx.split(Decoder(config, VOCAB, rngs=nnx.Rngs(0)), nnx.Param)
    params = nnx.to_pure_dict(state)
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, VOCAB)
    step = jax.jit(partial(loss_and_grads, graphdef))
    expected = step(params, tokens)

    mesh = make_mesh(axes)
    where = param_shardings(params, mesh)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, where)
        rows = jax.device_put(tokens, batch_sharding(mesh))
        sharded = jax.jit(
            partial(loss_and_grads, graphdef), out_shardings=(None, where)
        )
        found = sharded(placed, rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), expected, found
    )


def test_too_large_a_mesh_says_what_to_do() -> None:
    with pytest.raises(
        UserError, match="device_count=64 imagines.*name another --mesh"
    ):
        make_mesh("fsdp=64")
