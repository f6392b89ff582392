"""The ready rules of MaxText beside the dimension numbers that MaxText makes itself.

``python -m benchmarks.maxtext_rules`` builds MaxText's models at full size, as shapes
alone, and resolves every leaf with both. It needs what ``maxtext_collectives`` needs.
"""

import argparse
from typing import Any

import jax
from flax import nnx

import muon2_optax as m2
from benchmarks import record
from benchmarks.maxtext_collectives import configure, environment

# isort: split
# These come after the import above, which says what to do if MaxText is absent.
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.muon_utils import get_muon_weight_dimension_numbers

RESULTS = record.RESULTS / "maxtext_rules.jsonl"
MODELS = (
    "llama2-7b deepseek2-16b deepseek3-671b deepseek4-284b gemma3-4b qwen3-0.6b "
    "qwen3-30b-a3b qwen3-next-80b-a3b mixtral-8x7b gpt-oss-20b olmo3-7b llama4-17b-16e"
).split()


def compare(model_name: str, scan_layers: bool) -> dict[str, Any]:
    """How many leaves a model has, and those that the rules treat in another way."""
    config = configure(f"model_name={model_name} scan_layers={scan_layers}")
    mesh = maxtext_utils.get_mesh_from_config(config)
    _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    _, params, _ = nnx.split(model, nnx.Param, ...)
    dims = get_muon_weight_dimension_numbers(model, config)
    theirs = m2.MatrixRules.from_dimension_numbers(dims)
    ours = m2.ready_rules.maxtext()
    differ, matrices = [], 0
    paths = [path for path, _ in m2.Shardings.of(params).specs]
    for path, leaf in zip(paths, jax.tree.leaves(params), strict=True):
        want = theirs.resolve(path, leaf.shape)
        matrices += want is not None
        if ours.resolve(path, leaf.shape) != want:
            differ.append([path, leaf.shape])
    return {
        "benchmark": "maxtext_rules",
        "model": model_name,
        "scan_layers": scan_layers,
        "leaves": len(paths),
        "matrices": matrices,
        "differ": differ,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    args = parser.parse_args()
    for model in args.model or MODELS:
        for scan_layers in (True, False):
            row = compare(model, scan_layers)
            print(row, flush=True)
            record.write(RESULTS, [row | environment()])


if __name__ == "__main__":
    main()
