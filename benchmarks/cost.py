"""What a program does, read from it: products, and traffic between devices."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from examples.config import ModelConfig

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "f64": 8}


def product_flops(jaxpr: Any, times: float = 1.0) -> float:
    """Operations of all matrix products of a traced program, over all devices.

    Loops of known length count as often as they run, recomputation as often as it
    happens, and of a conditional the most expensive branch.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            total += times * _product(equation, contracted)
        elif name == "ragged_dot_general":
            numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
            total += times * _product(equation, numbers[0][0])
        elif name == "scan":
            total += product_flops(params["jaxpr"].jaxpr, times * params["length"])
        elif name == "cond":
            branches = params["branches"]
            total += max(product_flops(branch.jaxpr, times) for branch in branches)
        elif name == "shard_map":  # the program of one device
            devices = math.prod(params["mesh"].shape.values())
            total += product_flops(params["jaxpr"], times * devices)
        else:
            total += sum(product_flops(inner, times) for inner in _inner(params))
    return total


def _product(equation: Any, contracted: tuple[int, ...]) -> float:
    left = equation.invars[0].aval
    shared = math.prod(left.shape[axis] for axis in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * shared


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)  # a closed one
            if hasattr(item, "eqns"):
                yield item


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """{kind: (times, bytes of the results on one device)} of a compiled program.

    Inside a loop of known length each one counts as often as the loop runs.
    """
    bodies = _computations(text)
    times = _repetitions(bodies)
    found: dict[str, tuple[int, int]] = {}
    for name, lines in bodies.items():
        for line in lines:
            match = re.search(rf"= (.+?) ({_KINDS})(-start)?\(", line)
            if match is None:
                continue
            moved = sum(
                _BYTES.get(dtype, 4)
                * math.prod(map(int, filter(None, dims.split(","))))
                for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
            )
            if match.group(3):  # an asynchronous start returns its operand as well
                moved //= 2
            count, total = found.get(match.group(2), (0, 0))
            runs = times[name]
            found[match.group(2)] = (count + runs, total + runs * moved)
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation; the entry is the one named ''."""
    bodies: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head is not None and not line.startswith(" "):
            name = "" if head.group(1) else head.group(2)
            bodies[name] = []
        elif name is not None:
            bodies[name].append(line)
    return bodies


def _repetitions(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in one run of the program."""
    callers: dict[str, list[tuple[str, int]]] = {name: [] for name in bodies}
    for name, lines in bodies.items():
        for line in lines:
            known = re.search(r"known_trip_count\D+(\d+)", line)
            for keyword, called in re.findall(
                r"(body|condition|calls|to_apply)=%?([\w.\-]+)", line
            ):
                loops = int(known.group(1)) if known and keyword == "body" else 1
                callers[called].append((name, loops))
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in re.findall(r"[\w.\-]+", group):
                    callers[called].append((name, 1))
    times: dict[str, int] = {"": 1}

    def count(name: str) -> int:
        if name not in times:
            times[name] = sum(n * count(caller) for caller, n in callers[name])
        return times[name]

    return {name: count(name) for name in bodies}


def model_flops(config: ModelConfig, params: Any) -> float:
    """Operations of a training step for one token, from the shapes of the parameters.

    They are the products of the forward pass and twice that for the backward pass; of
    attention the half that a causal mask leaves. Recomputation, lookups and elementwise
    work are left out.
    """
    multiplied = 0.0
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        tied_head = name == "embed/embedding" and "lm_head" not in params
        if "/experts/" in name:
            multiplied += leaf.size * config.active_experts / config.experts
        elif tied_head or name.endswith("/kernel"):
            multiplied += leaf.size
    attention = config.layers * 2 * config.seq_len * config.dim
    return 3.0 * (2 * multiplied + attention)


# Dense bfloat16 FLOP/s of one device, by a part of its `device_kind`, from the vendors'
# data sheets: NVIDIA H100 SXM, H200 and A100, Google Cloud TPU v4 to v6e.
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "TPU v4": 275e12}
_PEAKS |= {"TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6": 918e12}


def peak_flops(devices: int) -> float | None:
    """FLOP/s that so many devices together could reach; None if unknown."""
    kind = jax.devices()[0].device_kind
    peak = next((peak for name, peak in _PEAKS.items() if name in kind), None)
    return None if peak is None else peak * devices
