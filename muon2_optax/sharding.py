"""Where parameters live: mesh and PartitionSpec, as far as tracing knows them."""

import dataclasses
import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from muon2_optax import trees
from muon2_optax.options import require_field, require_items

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shardings:
    """The shardings of a parameter tree, by path.

    On a mesh with Explicit axes (what ``jax.make_mesh`` makes) every array's type says
    how it is sharded, and nothing is needed. On Auto axes tracing cannot see it, and
    this object tells the optimizer::

        tx = muon2(0.02, shardings=Shardings.of(params))

    Frozen, hashable and not callable, like ``MatrixRules``.

    Attributes:
      mesh: the mesh of all sharded leaves.
      specs: ``((path, PartitionSpec), ...)`` of all leaves.

    Raises:
      TypeError: a field of another type than its own.
    """

    mesh: Mesh | AbstractMesh
    specs: tuple[tuple[str, PartitionSpec], ...]

    def __post_init__(self) -> None:
        require_field(self, "mesh", Mesh | AbstractMesh, "a mesh")
        wanted = (
            "what Shardings.of(params) makes, a tuple of (path, PartitionSpec) pairs"
        )
        require_items(self, "specs", _is_path_spec, wanted)
        object.__setattr__(self, "specs", tuple(map(tuple, self.specs)))

    @classmethod
    def of(cls, params: Any) -> "Shardings":
        """Reads the shardings of arrays or of ``jax.ShapeDtypeStruct``s.

        Args:
          params: tree whose leaves have a ``NamedSharding`` in ``.sharding`` (leaves of
            other kinds count as replicated), or a tree of ``NamedSharding``s.

        Raises:
          ValueError: no leaf has a NamedSharding, or two have different meshes.
        """
        meshes: dict[Any, str] = {}
        specs = []
        for name, leaf in trees.named_leaves(params):
            sharding = leaf if isinstance(leaf, NamedSharding) else None
            sharding = getattr(leaf, "sharding", sharding)
            named = isinstance(sharding, NamedSharding)
            specs.append((name, sharding.spec if named else PartitionSpec()))
            if named:
                meshes.setdefault(sharding.mesh, name)
        last = dict(specs)
        clashes = [n for n, spec in specs if last[n] != spec]
        if clashes:
            raise ValueError(
                f"two leaves share the path {clashes[0]!r} but not their sharding; "
                "rename one of them"
            )
        if len(meshes) != 1:
            found = (
                "none"
                if not meshes
                else ", ".join(f"{n}: {m}" for m, n in meshes.items())
            )
            raise ValueError(
                "Shardings.of needs parameters with NamedShardings on one mesh; found "
                f"{found}. Place them first, with jax.device_put or out_shardings"
            )
        return cls(next(iter(meshes)), tuple(specs))

    def spec(self, name: str) -> PartitionSpec:
        """The spec of a leaf.

        Raises:
          ValueError: there is no such leaf.
        """
        if name in self._spec_of_path:
            return self._spec_of_path[name]
        known = ", ".join(repr(n) for n, _ in self.specs[:3])
        raise ValueError(
            f"the Shardings do not know {trees.quote(name)}, only {known}"
            f"{', ...' if len(self.specs) > 3 else ''}; read them from the parameters "
            "that the optimizer gets, in the same containers"
        )

    @functools.cached_property
    def _spec_of_path(self) -> dict[str, PartitionSpec]:
        return dict(self.specs)

    @property
    def auto_mesh(self) -> Mesh | AbstractMesh:
        """The mesh with Auto axes, the only ones for which the optimizer asks it."""
        mesh, types = self.mesh, (AxisType.Auto,) * len(self.mesh.axis_names)
        here = jax.sharding.get_abstract_mesh()
        if isinstance(mesh, AbstractMesh) and here.shape_tuple == mesh.shape_tuple:
            # The mesh that is set may know its devices' kind, and JAX compares that.
            mesh = here
        if mesh.axis_types == types:
            return mesh
        if isinstance(mesh, Mesh):
            return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)


def _is_path_spec(pair: Any) -> bool:
    """Whether this is a path with its PartitionSpec."""
    return (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], PartitionSpec)
    )


def check_shardings(shardings: Any) -> Shardings | None:
    """What an optimizer was given as ``shardings``.

    Raises:
      TypeError: it is neither Shardings nor None.
    """
    if shardings is not None and not isinstance(shardings, Shardings):
        raise TypeError(
            f"shardings must be Shardings.of(params) or None, got {type(shardings)}"
        )
    return shardings


class Where(enum.Enum):
    """What is known of the device that a leaf lives on, see ``Location``."""

    ONE_DEVICE = "whole, on one device"
    SHARD_MAP = "a local part, inside jax.shard_map"
    MESH = "on a mesh of several devices"
    UNKNOWN = "on Auto axes without Shardings, or on axes some of which are Manual"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where one leaf lives, as far as tracing knows.

    Attributes:
      where: which of the four cases it is. Inside ``jax.shard_map`` what a leaf shows
        is local, and whole as far as the optimizer is concerned.
      mesh: of a leaf on a mesh; None in the other cases.
      spec: its PartitionSpec there.
      dims: for each of its dimensions the mesh axes that do divide it; axes of size 1
        are left out. A replicated leaf has none.
    """

    where: Where
    mesh: Any = None
    spec: PartitionSpec = PartitionSpec()
    dims: tuple[Axes, ...] = ()

    @property
    def on_mesh(self) -> bool:
        return self.where is Where.MESH

    @property
    def undivided(self) -> bool:
        """Whether XLA leaves what is done to the leaf on one device."""
        return self.where in (Where.ONE_DEVICE, Where.SHARD_MAP)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each device's part of the leaf on a mesh, else ``shape``."""
        if not self.on_mesh:
            return shape
        sizes = (math.prod(self.mesh.shape[a] for a in axes) for axes in self.dims)
        return tuple(n // size for n, size in zip(shape, sizes))

    def reshapable_sizes(self, x: Any) -> tuple[int | None, ...]:
        """The sizes of the dimensions on each device, where they may be reshaped there.

        None where tracing does not know the size, and where an Explicit axis divides
        the dimension.
        """
        if not self.on_mesh:
            return x.shape if self.undivided else (None,) * x.ndim
        mesh = typed_mesh(x)
        explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
        sizes = zip(self.local_shape(x.shape), self.dims)
        return tuple(None if explicit and axes else n for n, axes in sizes)


def locate(name: str, x: Any, shardings: Shardings | None = None) -> Location:
    """Where a leaf lives: from its type, or on Auto axes from the ``shardings``.

    Raises:
      ValueError: the shardings do not know ``name``, or do not fit the leaf's shape.
    """
    mesh = typed_mesh(x)
    # Inside jax.shard_map, values that do not depend on a parameter may name no mesh.
    types = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).axis_types
    if AxisType.Manual in types:
        local = all(t == AxisType.Manual for t in types)
        return Location(Where.SHARD_MAP if local else Where.UNKNOWN)
    if mesh is not None and all(t == AxisType.Explicit for t in types):
        spec = jax.typeof(x).sharding.spec
        if not isinstance(x, jax.core.Tracer):
            mesh = x.sharding.mesh
    elif shardings is not None:
        mesh, spec = shardings.auto_mesh, shardings.spec(name)
    else:
        alone = jax.device_count() == 1 if mesh is None else mesh.size == 1
        return Location(Where.ONE_DEVICE if alone else Where.UNKNOWN)
    if mesh.size == 1:
        return Location(Where.ONE_DEVICE)
    entries = tuple(spec) + (None,) * (x.ndim - len(spec))
    named = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
    parts = [math.prod(mesh.shape[a] for a in axes) for axes in named]
    if len(entries) != x.ndim or any(n % p for n, p in zip(x.shape, parts)):
        raise ValueError(
            f"{trees.quote(name)} of shape {tuple(x.shape)} cannot be divided as "
            f"{spec}; the Shardings were read from other parameters"
        )
    dims = tuple(tuple(a for a in axes if mesh.shape[a] > 1) for axes in named)
    return Location(Where.MESH, mesh, spec, dims)


def typed_mesh(x: Any) -> Any:
    """The mesh that the type of a leaf names, if any."""
    sharding = jax.typeof(x).sharding
    named = isinstance(sharding, NamedSharding) and not sharding.mesh.empty
    return sharding.mesh if named else None


def replicate(x: jax.Array) -> jax.Array:
    """x on every device, where the mesh has Explicit axes."""
    mesh = typed_mesh(x)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def zeros_like(p: Any, dtype: Any) -> jax.Array:
    """``jnp.zeros_like``, divided like p also while tracing on Explicit axes."""
    sharding = jax.typeof(p).sharding
    if (
        isinstance(p, jax.core.Tracer)
        and isinstance(sharding, NamedSharding)
        and AxisType.Explicit in sharding.mesh.axis_types
    ):
        return jnp.zeros(p.shape, dtype or p.dtype, device=sharding)
    # A dtype of its own keeps weakly typed parameters from making a weak state.
    return jnp.zeros_like(p, dtype or jnp.result_type(p))
