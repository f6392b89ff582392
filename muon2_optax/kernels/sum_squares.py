"""Sums of squares along rows and along columns in one pass, on NVIDIA Hopper.

XLA reads a matrix twice to reduce it along both of its axes.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from muon2_optax.arrays.stacks import vary_like

# The size of a thread block's tiles, and how many it takes, one below the other.
ROWS, COLUMNS, STEPS = 64, 64, 4
# How many tiles are on their way to a thread block.
STAGES = 2
# Bytes of the widest swizzle.
SWIZZLE = 128


def of_squares(x: jax.Array, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Partial sums of x^2 / max(m, n) for a stack (L, m, n) of real matrices.

    Args:
      x: float32 or 16 bits; rows of whole 128 bytes, m a multiple of 8.
      interpret: as in ``symmetric.product``.

    Returns:
      Float32 arrays (L, strips, m) and (L, parts, n). Their sums along axis 1 are one
      number per row, and one per column.
    """
    stack, m, n = x.shape
    strips, parts = pl.cdiv(n, COLUMNS), pl.cdiv(m, ROWS * STEPS)
    # Copies into a thread block end where the matrix does; those out of it do not, so
    # the results are larger.
    whole = parts * STEPS * ROWS, strips * COLUMNS
    kernel = plgpu.kernel(
        functools.partial(_kernel, scale=max(m, n) ** -0.5),
        out_type=[
            jax.ShapeDtypeStruct((stack, strips, whole[0]), jnp.float32),
            jax.ShapeDtypeStruct((stack, parts, whole[1]), jnp.float32),
        ],
        grid=(stack, parts, strips),
        grid_names=("member", "part", "strip"),
        scratch_types=[
            plgpu.SMEM((ROWS * STEPS,), jnp.float32),
            plgpu.SMEM((COLUMNS,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    with jax.enable_x64(False):
        rows, columns = (vary_like(y, x) for y in kernel(x))
    return rows[..., :m], columns[..., :n]


def _kernel(
    x_hbm: Any,
    rows_hbm: Any,
    columns_hbm: Any,
    rows: Any,
    columns: Any,
    *,
    scale: float,
) -> None:
    member, part, strip = map(lax.axis_index, ("member", "part", "strip"))
    wide = SWIZZLE // x_hbm.dtype.itemsize

    def body(indices: Any, tile: Any, total: Any) -> Any:
        # Scale before squaring, so that large values do not overflow.
        square = jnp.square(tile[...].astype(jnp.float32) * scale)
        rows[pl.ds(indices[0] * ROWS, ROWS)] = jnp.sum(square, axis=1)
        return total + square

    total = plgpu.emit_pipeline(
        body,
        grid=(STEPS,),
        in_specs=[
            plgpu.BlockSpec(
                (ROWS, COLUMNS),
                lambda step: (part * STEPS + step, strip),
                transforms=(
                    plgpu.TilingTransform((8, wide)),
                    plgpu.SwizzleTransform(SWIZZLE),
                ),
            )
        ],
        max_concurrent_steps=STAGES,
        init_carry=jnp.zeros((ROWS, COLUMNS), jnp.float32),
    )(x_hbm.at[member])
    columns[...] = jnp.sum(total, axis=0)
    plgpu.commit_smem()
    below = pl.ds(part * STEPS * ROWS, STEPS * ROWS)
    plgpu.copy_smem_to_gmem(rows, rows_hbm.at[member, strip, below])
    right = pl.ds(strip * COLUMNS, COLUMNS)
    plgpu.copy_smem_to_gmem(columns, columns_hbm.at[member, part, right])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
