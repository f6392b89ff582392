"""Parameters for other libraries: `python -m examples.export --run RUN --out FILE`.

A LLaMA has the names and shapes of Hugging Face's `LlamaForCausalLM`, a GPT those of
its `GPT2LMHeadModel`, in a file of the safetensors format. `examples.pretrain
--init-from FILE.safetensors` begins with such a file, whoever wrote it.
"""

import dataclasses
import sys
import zlib
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from examples.checkpoint import load_params
from examples.config import ModelConfig, TrainedConfig
from examples.files import write_atomically
from examples.options import UserError, check, command, option

# Their names to ours, where # is the number of a block. torch's Linear is (out, in), so
# that kernels of a LLaMA are transposed; GPT-2's Conv1D is (in, out) as ours is, and
# has query, key and value side by side. Both rotate the halves of a head as we do.
_LLAMA = {
    "model.embed_tokens.weight": "embed/embedding",
    "model.layers.#.input_layernorm.weight": "blocks/#/attention_norm/scale",
    "model.layers.#.self_attn.q_proj.weight": "blocks/#/attention/query/kernel",
    "model.layers.#.self_attn.k_proj.weight": "blocks/#/attention/key/kernel",
    "model.layers.#.self_attn.v_proj.weight": "blocks/#/attention/value/kernel",
    "model.layers.#.self_attn.o_proj.weight": "blocks/#/attention/out/kernel",
    "model.layers.#.post_attention_layernorm.weight": "blocks/#/mlp_norm/scale",
    "model.layers.#.mlp.gate_proj.weight": "blocks/#/mlp/gate/kernel",
    "model.layers.#.mlp.up_proj.weight": "blocks/#/mlp/up/kernel",
    "model.layers.#.mlp.down_proj.weight": "blocks/#/mlp/down/kernel",
    "model.norm.weight": "final_norm/scale",
    "lm_head.weight": "lm_head/kernel",
}
_GPT = {
    "transformer.wte.weight": "embed/embedding",
    "transformer.wpe.weight": "position_table",
    "transformer.h.#.ln_1.weight": "blocks/#/attention_norm/scale",
    "transformer.h.#.ln_1.bias": "blocks/#/attention_norm/bias",
    "transformer.h.#.attn.c_attn.weight": "blocks/#/attention/query+key+value/kernel",
    "transformer.h.#.attn.c_attn.bias": "blocks/#/attention/query+key+value/bias",
    "transformer.h.#.attn.c_proj.weight": "blocks/#/attention/out/kernel",
    "transformer.h.#.attn.c_proj.bias": "blocks/#/attention/out/bias",
    "transformer.h.#.ln_2.weight": "blocks/#/mlp_norm/scale",
    "transformer.h.#.ln_2.bias": "blocks/#/mlp_norm/bias",
    "transformer.h.#.mlp.c_fc.weight": "blocks/#/mlp/up/kernel",
    "transformer.h.#.mlp.c_fc.bias": "blocks/#/mlp/up/bias",
    "transformer.h.#.mlp.c_proj.weight": "blocks/#/mlp/down/kernel",
    "transformer.h.#.mlp.c_proj.bias": "blocks/#/mlp/down/bias",
    "transformer.ln_f.weight": "final_norm/scale",
    "transformer.ln_f.bias": "final_norm/bias",
}
_SIDE_BY_SIDE = "query+key+value"

SUFFIX = ".safetensors"
_DTYPES = {"F32": np.dtype("float32"), "BF16": np.dtype(jnp.bfloat16)}
_DTYPES |= {"F16": np.dtype("float16")}
# Of attention masks and angles, which are computed: files may hold them.
_COMPUTED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def layout(config: ModelConfig) -> dict[str, list[tuple[str, Any]]]:
    """Names of tensors to the paths of our parameters that lie in each, with the number
    of the layer where layers are scanned.
    """
    said = f"{config.model}: only the layouts of LLaMA and GPT-2 are known"
    check(config.architecture in ("llama", "gpt"), said)
    found = {}
    for theirs, ours in (_LLAMA if config.architecture == "llama" else _GPT).items():
        parts = _SIDE_BY_SIDE.split("+") if _SIDE_BY_SIDE in ours else [_SIDE_BY_SIDE]
        for number in range(config.layers if "#" in theirs else 1):
            path = ours.replace("#/", "" if config.scan_layers else f"{number}/")
            layer = number if config.scan_layers and "#" in ours else ...
            places = [(path.replace(_SIDE_BY_SIDE, part), layer) for part in parts]
            found[theirs.replace("#", str(number))] = places
    return found


def _is_turned(config: ModelConfig, path: str) -> bool:
    return config.architecture == "llama" and path.endswith("/kernel")


def _by_path(params: Any) -> dict[str, Any]:
    found = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in found}


def to_tensors(config: ModelConfig, params: Any) -> dict[str, np.ndarray]:
    """Parameters by the names of their layout."""
    ours, tensors = _by_path(jax.tree.map(np.asarray, params)), {}
    for name, places in layout(config).items():
        whole = np.concatenate([ours[path][layer] for path, layer in places], axis=-1)
        tensors[name] = whole.T if _is_turned(config, places[0][0]) else whole
    return tensors


def from_tensors(config: ModelConfig, tensors: dict[str, np.ndarray], like: Any) -> Any:
    """Parameters of the shapes and shardings of `like`.

    Raises:
      UserError: a tensor is missing, of another shape, or not of this layout.
    """
    # GPT-2 as it was published lacks the first part of the names.
    rest = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    twice = [name for name in rest if {name, f"transformer.{name}"} <= tensors.keys()]
    check(not twice, f"tensor {'; '.join(twice[:1])} is there under two names")
    if config.architecture == "gpt" and "lm_head.weight" in rest:
        tied = np.array_equal(rest.pop("lm_head.weight"), rest.get("wte.weight", ()))
        said = "tensor lm_head.weight differs from wte.weight, to which it is tied"
        check(tied, said)
    made = {path: np.empty(x.shape, np.float32) for path, x in _by_path(like).items()}
    for name, places in layout(config).items():
        tensor = rest.pop(name.removeprefix("transformer."), None)
        if tensor is None:
            raise UserError(f"tensor {name} is missing")
        ours = [made[path][layer] for path, layer in places]  # to be filled
        shape = *ours[0].shape[:-1], sum(part.shape[-1] for part in ours)
        turned = _is_turned(config, places[0][0])
        shape = shape[::-1] if turned else shape
        said = f"has the shape {tensor.shape}, this model needs {shape}"
        check(tensor.shape == shape, f"tensor {name} {said}")
        # Whole numbers would be those of a quantized model, whose scales are elsewhere.
        said = f"is of {tensor.dtype}, not of {', '.join(_DTYPES)}"
        check(tensor.dtype in _DTYPES.values(), f"tensor {name} {said}")
        whole = np.asarray(tensor.T if turned else tensor, np.float32)
        check(bool(np.isfinite(whole).all()), f"tensor {name} is not finite")
        for mine, part in zip(ours, np.split(whole, len(ours), axis=-1)):
            mine[...] = part
    known = [name for name in rest if not name.endswith(_COMPUTED)]
    check(not known, f"tensor {'; '.join(known[:1])} has no place in {config.model}")

    def place(x: np.ndarray, like: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, like.sharding, lambda i: x[i])

    params = jax.tree.structure(like).unflatten(made.values())
    return jax.tree.map(place, params, like)


def write(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Write a file of tensors in F32, BF16 or F16, with a checksum for each."""
    with np.errstate(over="ignore"):  # refused below, by name
        made = {n: np.ascontiguousarray(x, _DTYPES[dtype]) for n, x in tensors.items()}
    for name, tensor in made.items():
        lost = np.isfinite(tensors[name]) & ~np.isfinite(tensor)
        check(not lost.any(), f"tensor {name} does not fit in {dtype}")
    sums = {f"crc32 {name}": _checksum(tensor) for name, tensor in made.items()}
    write_atomically(path, safetensors.numpy.save(made, {"format": "pt", **sums}))


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file; those that carry a checksum are compared with it."""
    tensors: dict[str, np.ndarray] = {}
    with safetensors.safe_open(path, framework="np") as file:
        sums = file.metadata() or {}
        for name in file.keys():
            try:
                tensors[name] = file.get_tensor(name)
            except AttributeError as error:  # NumPy has no such dtype
                raise UserError(f"tensor {name}: {error}") from None
            known = sums.get(f"crc32 {name}") in (None, _checksum(tensors[name]))
            said = "is damaged: its numbers are not those that were written"
            check(known, f"tensor {name} {said}")
    return tensors


def _checksum(tensor: np.ndarray) -> str:
    return f"{zlib.crc32(tensor.tobytes()):08x}"


def load(path: Path, config: ModelConfig, like: Any) -> Any:
    """The parameters in a file, of the shapes and shardings of `like`."""
    try:
        return from_tensors(config, read(path), like)
    except (OSError, UserError) as error:
        raise UserError(f"--init-from {path}: {error}") from None
    except safetensors.SafetensorError as error:
        said = f"not a safetensors file, or a damaged one ({error})"
        raise UserError(f"--init-from {path}: {said}") from None


@dataclasses.dataclass(frozen=True)
class ExportConfig(TrainedConfig):
    """Which parameters go into which file."""

    out: str = option("", "the file to write, NAME.safetensors")
    dtype: Literal["F32", "BF16", "F16"] = option("F32", "of the numbers in the file")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.out.endswith(SUFFIX), f"--out NAME{SUFFIX} is needed")


def _export(given: ExportConfig) -> None:
    """Write the parameters of a run as safetensors."""
    params, config, _ = load_params(given.run, given.optimizer, given.step)
    tensors = to_tensors(config.model, params)
    write(Path(given.out), tensors, given.dtype)
    print(f"{given.out}: {len(tensors)} tensors")


main = command("examples.export", ExportConfig, _export)

if __name__ == "__main__":
    sys.exit(main())
