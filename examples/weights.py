"""Weights in the layouts of Hugging Face's LLaMA and GPT-2, as .safetensors files.

`python -m examples.weights --run RUN --out model.safetensors` exports those of a run;
`python -m examples.pretrain --init-from model.safetensors` begins with them.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples import options
from examples.options import Options, UserError, check, option

# Our modules, with {} for the number of a layer, and those there. Products of LLaMA are
# stored as (out, in); those of GPT-2 as (in, out), with q, k and v beside each other.
_LLAMA = {
    "embed": "model.embed_tokens",
    "blocks/{}/attention_norm": "model.layers.{}.input_layernorm",
    "blocks/{}/attention/query": "model.layers.{}.self_attn.q_proj",
    "blocks/{}/attention/key": "model.layers.{}.self_attn.k_proj",
    "blocks/{}/attention/value": "model.layers.{}.self_attn.v_proj",
    "blocks/{}/attention/out": "model.layers.{}.self_attn.o_proj",
    "blocks/{}/mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks/{}/mlp/gate": "model.layers.{}.mlp.gate_proj",
    "blocks/{}/mlp/up": "model.layers.{}.mlp.up_proj",
    "blocks/{}/mlp/down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
_GPT = {
    "embed": "transformer.wte",
    "position_table": "transformer.wpe",
    "blocks/{}/attention_norm": "transformer.h.{}.ln_1",
    "blocks/{}/attention/query": "transformer.h.{}.attn.c_attn",
    "blocks/{}/attention/key": "transformer.h.{}.attn.c_attn",
    "blocks/{}/attention/value": "transformer.h.{}.attn.c_attn",
    "blocks/{}/attention/out": "transformer.h.{}.attn.c_proj",
    "blocks/{}/mlp_norm": "transformer.h.{}.ln_2",
    "blocks/{}/mlp/up": "transformer.h.{}.mlp.c_fc",
    "blocks/{}/mlp/down": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
}
_FUSED = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class WeightsConfig(Options):
    """Which run's weights go where."""

    run: str = option("", "folder of the run")
    optimizer: str | None = option(None, "whose weights, if the run compared several")
    step: str | None = option(None, "checkpoint: a step or 'best' (default: newest)")
    out: str = option("model.safetensors", "the file to write")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.run), "--run FOLDER is needed")


def _library() -> Any:
    try:
        import safetensors.numpy

        return safetensors.numpy
    except ImportError:
        said = "the package 'safetensors' is not installed (pip install safetensors)"
        raise UserError(said) from None


def _places(params: Any) -> Iterator[tuple[tuple[Any, ...], int | None, str, Any]]:
    """For each matrix or vector of a layer: its path, its number in a stack of layers,
    its name there, and its part of what is fused there.
    """
    import jax

    known = _GPT if "position_table" in params else _LLAMA
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        module, _, kind = name.rpartition("/")
        stacked = module.startswith("blocks/") and not re.match(r"blocks/\d", module)
        numbers = range(len(leaf)) if stacked else [None]
        for number in numbers:
            here = module if number is None else module.replace("/", f"/{number}/", 1)
            key = re.sub(r"/\d+/", "/{}/", here or kind)
            check(key in known, f"{name}: LLaMA and GPT-2 have no such weights")
            layer = re.findall(r"/(\d+)/", here)
            there = known[key].format(*layer) + (
                ".bias" if kind == "bias" else ".weight"
            )
            part = key.rpartition("/")[2]
            fused = _FUSED.index(part) if known is _GPT and part in _FUSED else None
            yield path, number, there, fused


def export(params: Any, file: Path) -> None:
    """Write parameters of a LLaMA or GPT as float32 .safetensors."""
    import jax
    import numpy as np

    library = _library()
    leaves = dict(jax.tree.leaves_with_path(params))
    transposed = "position_table" not in params
    parts: dict[str, list[Any]] = {}
    for path, number, there, _ in _places(params):
        x = np.asarray(leaves[path] if number is None else leaves[path][number])
        turn = transposed and getattr(path[-1], "key", "") == "kernel"
        parts.setdefault(there, []).append(x.T if turn else x)
    # Paths are sorted, and key, query and value are not in the order of q, k and v.
    order = {there: [] for there in parts}
    for _, _, there, fused in _places(params):
        order[there].append(fused or 0)
    joined = {}
    for there, arrays in parts.items():
        placed = [x for _, x in sorted(zip(order[there], arrays), key=lambda p: p[0])]
        joined[there] = np.ascontiguousarray(np.concatenate(placed, axis=-1))
    try:
        library.save_file(joined, str(file), metadata={"format": "pt"})
    except OSError as error:
        from examples.files import WriteFailed

        raise WriteFailed(file, error) from None


def load(file: Path, params: Any) -> Any:
    """The parameters of a file, of the shapes and where `params` (abstract) says.

    Raises:
      UserError: the file cannot be read, or weights are missing or of other shapes.
    """
    import jax
    import numpy as np

    try:
        found = _library().load_file(str(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None
    except Exception as error:  # SafetensorError is none of ValueError
        raise UserError(f"{file}: not a .safetensors file ({error})") from None
    transposed = "position_table" not in params
    new: dict[Any, list[Any]] = {}
    for path, _, there, fused in _places(params):
        # GPT-2's own files leave the first word out.
        x = found.get(there, found.get(there.removeprefix("transformer.")))
        check(x is not None, f"{file}: no {there} in it")
        x = np.asarray(x, np.float32)
        x = x if fused is None else np.split(x, 3, axis=-1)[fused]
        turn = transposed and getattr(path[-1], "key", "") == "kernel"
        new.setdefault(path, []).append(x.T if turn else x)

    def place(path: Any, leaf: Any) -> jax.Array:
        parts = new[path]
        stacked = leaf.ndim > parts[0].ndim
        x = np.stack(parts) if stacked else parts[0]
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        said = f"{file}: {name} has the shape {x.shape}, this run's model {leaf.shape}"
        check(x.shape == leaf.shape, said)
        return jax.make_array_from_callback(x.shape, leaf.sharding, lambda i: x[i])

    return jax.tree_util.tree_map_with_path(place, params)


def main(argv: Sequence[str] | None = None) -> int:
    """Export the weights of a run; returns the exit code."""

    def run() -> None:
        about = "Export the weights of a run."
        config: WeightsConfig = options.parse_one(WeightsConfig, argv, about)
        from examples.checkpoint import load_params

        params, _, _ = load_params(config.run, config.optimizer, config.step)
        export(params, Path(config.out))
        print(config.out)

    return options.run_command("weights", run)


if __name__ == "__main__":
    sys.exit(main())
