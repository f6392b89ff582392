"""Parameters in the layouts of Hugging Face: what another implementation computes.

The oracles are a reader of the format and forward passes of both layouts that are
written here, in NumPy and float64, from what torch's modules do with such tensors.
"""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from examples import export
from examples.config import ModelConfig
from examples.models import make_model
from examples.options import UserError
from examples.pretrain import main as pretrain

VOCAB, HEADS, LAYERS, LENGTH = 43, 2, 3, 12
Tensors = dict[str, np.ndarray]


def small(architecture: str, **more: Any) -> ModelConfig:
    sizes = {"dim": 24, "layers": LAYERS, "heads": HEADS, "hidden": 40}
    return ModelConfig(model=f"{architecture}_tiny", seq_len=LENGTH, **sizes, **more)


def made(config: ModelConfig) -> tuple[Any, Any]:
    """A model all of whose parameters matter, biases and scales included."""
    graphdef, init = make_model(config, VOCAB)
    params = init(jax.random.key(3))
    rng = np.random.default_rng(5)

    def shaken(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32)

    return graphdef, jax.tree.map(shaken, params)


def parse(path: Path) -> Tensors:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            assert entry["dtype"] in ("F32", "BF16")
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "F32":
                values = np.frombuffer(raw[begin:end], "<f4")
            else:  # the upper half of a float32
                upper = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32)
                values = (upper << 16).view(np.float32)
            found[name] = values.reshape(entry["shape"]).astype(np.float64)
    return found


def unparse(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def causal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(H, L, K) each; the heads side by side in the result."""
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    scores[:, ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    return np.concatenate([*(softmax(scores) @ v)], axis=-1)


def heads(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)


def llama_logits(t: Tensors, ids: np.ndarray, theta: float) -> np.ndarray:
    def rms(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * t[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"].T

    def rotate_half(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)

    x = t["model.embed_tokens.weight"][ids]
    width = x.shape[1] // HEADS
    inverse = 1 / theta ** (np.arange(0, width, 2) / width)
    angle = np.outer(np.arange(len(ids)), inverse)
    angle = np.concatenate([angle, angle], axis=-1)

    def turned(x: np.ndarray) -> np.ndarray:
        return x * np.cos(angle) + rotate_half(x) * np.sin(angle)

    for number in range(LAYERS):
        at = f"model.layers.{number}"
        y = rms(x, f"{at}.input_layernorm")
        q, k, v = (heads(linear(y, f"{at}.self_attn.{n}_proj")) for n in "qkv")
        y = causal(turned(q), turned(k), v)
        x = x + linear(y, f"{at}.self_attn.o_proj")
        y = rms(x, f"{at}.post_attention_layernorm")
        gate, up = (linear(y, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
    return linear(rms(x, "model.norm"), "lm_head")


def gpt_logits(t: Tensors, ids: np.ndarray, theta: float) -> np.ndarray:
    del theta

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def conv1d(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def gelu_new(x: np.ndarray) -> np.ndarray:
        return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

    wte = t["transformer.wte.weight"]
    x = wte[ids] + t["transformer.wpe.weight"][: len(ids)]
    for number in range(LAYERS):
        at = f"transformer.h.{number}"
        qkv = np.split(conv1d(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn"), 3, axis=-1)
        x = x + conv1d(causal(*map(heads, qkv)), f"{at}.attn.c_proj")
        y = gelu_new(conv1d(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"))
        x = x + conv1d(y, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ wte.T


@pytest.mark.parametrize(
    ("architecture", "scan_layers"),
    [
        ("llama", False),
        ("gpt", True),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gpt", False, marks=pytest.mark.slow),
    ],
)
def test_another_implementation_computes_the_same_logits(
    architecture: str, scan_layers: bool, tmp_path: Path
) -> None:
    config = small(architecture, scan_layers=scan_layers, rope_theta=500.0)
    graphdef, params = made(config)
    path = tmp_path / "model.safetensors"
    export.write(path, export.to_tensors(config, params), "F32")
    ids = np.random.default_rng(7).integers(0, VOCAB, LENGTH)
    forward = {"llama": llama_logits, "gpt": gpt_logits}[architecture]
    expected = forward(parse(path), ids, config.rope_theta)
    ours = np.asarray(nnx.merge(graphdef, params)(ids[None]))[0]
    # Float32 against float64: some 1e-7 of the largest terms, over three blocks.
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())
    back = export.load(path, config, params)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_16_bits_are_the_nearest_numbers(tmp_path: Path) -> None:
    config = small("gpt")
    _, params = made(config)
    path = tmp_path / "model.safetensors"
    export.write(path, export.to_tensors(config, params), "BF16")
    back = export.load(path, config, params)
    nearest = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    jax.tree.map(np.testing.assert_array_equal, back, nearest)
    wpe = parse(path)["transformer.wpe.weight"]
    np.testing.assert_array_equal(wpe, nearest["position_table"])


def test_numbers_beyond_the_range_of_a_dtype_are_refused(tmp_path: Path) -> None:
    path, huge = tmp_path / "model.safetensors", np.float32([[1e30, 1.0]])
    with pytest.raises(UserError, match="tensor w does not fit in F16"):
        export.write(path, {"w": huge}, "F16")
    assert not path.exists()


def test_the_public_gpt2_has_shorter_names_and_masks(tmp_path: Path) -> None:
    config = small("gpt")
    _, params = made(config)
    tensors = export.to_tensors(config, params)
    short = {n.removeprefix("transformer."): x for n, x in tensors.items()}
    short["h.0.attn.bias"] = np.tri(LENGTH, dtype=np.float32)[None, None]
    path = tmp_path / "model.safetensors"
    export.write(path, short, "F32")
    back = export.load(path, config, params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    # Some files hold the head, to which the embedding is tied, as well.
    tied = tensors | {"lm_head.weight": short["wte.weight"].copy()}
    back = export.from_tensors(config, tied, params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    with pytest.raises(UserError, match="lm_head.weight differs from wte.weight"):
        export.from_tensors(
            config, tied | {"lm_head.weight": -tied["lm_head.weight"]}, params
        )
    twice = tensors | {"ln_f.bias": short["ln_f.bias"]}
    with pytest.raises(UserError, match="tensor ln_f.bias is there under two names"):
        export.from_tensors(config, twice, params)


def test_parameters_come_back_divided_over_a_mesh(tmp_path: Path) -> None:
    config = small("llama")
    _, params = made(config)
    path = tmp_path / "model.safetensors"
    export.write(path, export.to_tensors(config, params), "F32")
    mesh = jax.make_mesh((4,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=whole if x.shape[0] % 4 else rows
        ),
        params,
    )
    back = export.load(path, config, like)
    assert back["blocks"][1]["mlp"]["up"]["kernel"].sharding == rows
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_the_safetensors_library_agrees(tmp_path: Path) -> None:
    config = small("llama")
    _, params = made(config)
    tensors, path = export.to_tensors(config, params), tmp_path / "model.safetensors"
    export.write(path, tensors, "F32")
    theirs = safetensors.numpy.load_file(path)
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(theirs[name], tensor)
    safetensors.numpy.save_file({n: x.copy() for n, x in tensors.items()}, path)
    jax.tree.map(
        np.testing.assert_array_equal, export.load(path, config, params), params
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("short", "a damaged one .*not fully covered"),
        ("bit", "tensor model.layers.0.mlp.up_proj.weight is damaged"),
        ("header", "a damaged one .*header"),
        ("empty", "not a safetensors file"),
        ("gone", "No such file"),
        ("missing", "tensor model.norm.weight is missing"),
        (
            "shape",
            r"tensor lm_head.weight has the shape \(24, 43\), this .* \(43, 24\)",
        ),
        ("nan", "tensor model.norm.weight is not finite"),
        ("dtype", "a damaged one .*I7"),
        ("float8", "tensor model.norm.weight: .*float8"),
        ("whole", "tensor model.norm.weight is of int32, not of F32, BF16, F16"),
        ("offsets", "a damaged one .*model.norm.weight"),
        ("more", "tensor model.layers.3.mlp.up_proj.weight has no place"),
    ],
)
def test_damage_is_one_line_that_names_the_tensor(
    damage: str, said: str, tmp_path: Path
) -> None:
    config = small("llama")
    _, params = made(config)
    path = tmp_path / "model.safetensors"
    tensors = export.to_tensors(config, params)
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "shape":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].T
    elif damage == "nan":
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.nan
    elif damage == "more":
        other = tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = other
    export.write(path, tensors, "F32")
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    if damage == "short":
        path.write_bytes(raw[:-1])
    elif damage == "bit":
        name = "model.layers.0.mlp.up_proj.weight"
        data[header[name]["data_offsets"][0] + 5] ^= 4
        unparse(path, header, bytes(data))
    elif damage == "header":
        path.write_bytes(raw[:8] + b"}" + raw[9:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "gone":
        path.unlink()
    elif damage in ("dtype", "float8", "whole", "offsets"):
        header["model.norm.weight"] |= {
            "dtype": {"dtype": "I7"},
            "float8": {"dtype": "F8_E5M2", "shape": [4 * 24]},
            "whole": {"dtype": "I32"},
            "offsets": {"data_offsets": [8, 3]},
        }[damage]
        del header["__metadata__"]  # of a file that somebody else wrote
        unparse(path, header, bytes(data))
    with pytest.raises(UserError, match=said) as error:
        export.load(path, config, params)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_mixture_of_experts_has_no_layout() -> None:
    with pytest.raises(UserError, match="moe_tiny: only the layouts of LLaMA and GPT"):
        export.layout(ModelConfig(model="moe_tiny"))


def test_a_run_is_exported_and_another_begins_with_it(
    text_path: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*tiny, "--data", str(text_path), "--optimizer", "adamw", "--steps", "6"]
    argv += ["--warmup-steps", "1"]
    assert pretrain([*argv, "--out", str(tmp_path / "first")]) == 0
    file = tmp_path / "model.safetensors"
    words = ["--run", str(tmp_path / "first"), "--out", str(file)]
    assert export.main(words) == 0
    assert "12 tensors" in capsys.readouterr().out
    again = [*argv, "--init-from", str(file), "--out", str(tmp_path / "second")]
    assert pretrain([*again, "--learning-rate", "1e-9"]) == 0
    lines = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("first", "second")]
    losses = [json.loads(text.splitlines()[-1])["val_loss"] for text in lines]
    # Steps of next to no length leave the loss where the first run has left it.
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    capsys.readouterr()
    assert pretrain([*again[:-1], str(tmp_path / "wide"), "--dim", "64"]) == 2
    err = capsys.readouterr().err
    assert "tensor model.embed_tokens.weight has the shape (257, 32)" in err
    assert err.count("\n") == 1
    assert export.main(["--run", str(tmp_path / "first"), "--out", "model.bin"]) == 2
