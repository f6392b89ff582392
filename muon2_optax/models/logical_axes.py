"""What logical axis names say of a parameter: a table, and how it is read.

Linen code in the style of T5X and MaxText names the axes of each parameter, for
sharding: ``nn.with_logical_partitioning(init, ("embed", "mlp"))``. The names also tell
which axes are inputs, outputs, or stacks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from muon2_optax.axes import MatrixAxes
from muon2_optax.models.layers import Weight

STACK, ADAM, WINDOW = "stack", "adam", "window"

# What each name stands for. "stack": one matrix for each index. "adam": the leaf is a
# table or a vector, whatever its other axes are. "window": the taps of a convolution,
# summed over. Any other word names a space; neighbouring axes of one space (heads and
# the size of a head) form one side of the matrix. The names are those of T5X and
# Flaxformer (partitioning.py) and MaxText (configs/base.yml).
LOGICAL_AXES: Mapping[str, str] = {
    # repeated layers and experts, projections side by side
    **dict.fromkeys(
        "layers layer stack scan stage circular_repeats layers_outside_pipeline"
        " dense_layers moe_layers layers_per_stage expert experts exp exp_with_fsdp"
        " num_experts qkv num_activations mlp_activations stacked_params".split(),
        STACK,
    ),
    **dict.fromkeys(
        "vocab norm relpos_buckets abspos_buckets position positions length"
        " embed_norm classes num_classes codebook".split(),
        ADAM,
    ),
    **dict.fromkeys("conv_height conv_width conv_window conv_kernel".split(), WINDOW),
    **dict.fromkeys(
        "embed embed_vocab embed_no_exp embed_moe embed_tensor_transpose emb".split(),
        "model",
    ),
    **dict.fromkeys(
        "heads q_heads kv_heads kv head_dim kv_head_dim q_head_dim v_head_dim"
        " joined_kv".split(),
        "attention",
    ),
    **dict.fromkeys("mlp mlp_moe mlp_no_fsdp expert_mlp hidden".split(), "hidden"),
    **dict.fromkeys("q_lora q_lora_up_proj".split(), "latent queries"),
    **dict.fromkeys("kv_lora kv_lora_up_proj".split(), "latent keys and values"),
    **dict.fromkeys("input inputs in_features".split(), "input"),
    **dict.fromkeys("output outputs out_features".split(), "output"),
}


def weight_of(names: Sequence[Any], table: Mapping[str, str]) -> Weight | None:
    """What the names of a leaf's axes say; None if they leave it open.

    Kernels are stored inputs first, so the first space is the input side, the second
    the output side.

    >>> weight_of(("embed", "layers", "heads", "kv"), LOGICAL_AXES).axes
    MatrixAxes(in_axis=(0,), out_axis=(2, 3), out_splits=())
    """
    roles = [table.get(name) if isinstance(name, str) else None for name in names]
    if ADAM in roles:
        return Weight(None)
    if None in roles or not roles:
        return None
    window = [axis for axis, role in enumerate(roles) if role == WINDOW]
    sides: list[list[int]] = []
    for axis, role in enumerate(roles):
        if role in (STACK, WINDOW):
            continue
        if sides and roles[sides[-1][-1]] == role:
            sides[-1].append(axis)
        else:
            sides.append([axis])
    if len(sides) == 1 and len(sides[0]) == 2:
        first, second = sides[0]
        if names[first] == names[second]:  # a square map of a space to itself
            sides = [[first], [second]]
    if len(sides) == 2:
        return Weight(MatrixAxes((*window, *sides[0]), tuple(sides[1])))
    # One side only: a bias of heads, a gain of each expert, a depthwise window.
    return Weight(None) if len(sides) < 2 else None


def read(
    names: Sequence[Any], rank: int, table: Mapping[str, str]
) -> tuple[Weight, str] | None:
    """What the names of a leaf of this rank say, and the reason for ``describe``."""
    weight = weight_of(names, table) if len(names) == rank else None
    if weight is None:
        return None
    return weight, f"logical axes ({', '.join(map(str, names))})"
