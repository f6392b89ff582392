"""The path of a leaf as a list of names, whichever framework wrote it.

Frameworks print the same leaf in many ways: ``params/h_0/ln_1/scale``,
``h_0.ln_1.scale``, ``('h_0', 'ln_1', 'scale')``, ``h_0/~/ln_1/scale``,
``h_0/ln_1/scale/value``. All of these have one normal form, ``h_0/ln_1/scale``. Names
are compared in it, and by whole words: ``LayerNorm_0`` and ``layer_norm`` have the word
"norm", ``normalizer`` has not.
"""

import dataclasses
import functools
import re

# Whatever is no letter, digit, "_" or "-" separates: "/", ".", Haiku's "~", and the
# brackets, quotes and commas of a tuple that is a key.
_SEPARATORS = re.compile(r"[^\w\-]+")
# The collection that Flax puts around all parameters; the attribute that holds the
# array of a variable (Flax NNX) or of a named array (Haliax).
_AROUND, _INSIDE = ("params",), ("value", "raw_value", "array")
_WORDS = re.compile(r"\d+d(?![a-zA-Z])|\d+D(?![a-z])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Abbreviations in which a capital letter starts no word.
_ONE_WORD = re.compile(r"LoRA|MoE|mHC")


@functools.lru_cache(maxsize=1 << 16)
def components(path: str) -> tuple[str, ...]:
    """The components of a path's normal form.

    Separators of every kind are alike. ``params`` in front is dropped, and at the end
    the attribute by which a box holds its array: ``value``, ``raw_value``, ``array``.

    >>> components("['params']['h_0'].kernel.value")
    ('h_0', 'kernel')
    """
    parts = [part for part in _SEPARATORS.split(path) if part]
    while len(parts) > 1 and parts[0] in _AROUND:
        del parts[0]
    while len(parts) > 1 and parts[-1] in _INSIDE:
        del parts[-1]
    return tuple(parts)


def normal(path: str) -> str:
    """The normal form of a path: its ``components``, joined by "/"."""
    return "/".join(components(path))


@functools.lru_cache(maxsize=1 << 14)
def words(component: str) -> tuple[str, ...]:
    """The words of a component in lower case; numbers at its end do not count.

    >>> words("LayerNormMLP_0"), words("conv1d"), words("normalizer")
    (('layer', 'norm', 'mlp'), ('conv', '1d'), ('normalizer',))
    """
    whole = _ONE_WORD.sub(lambda found: found.group().capitalize(), component)
    found = [word.lower() for word in _WORDS.findall(whole)]
    while len(found) > 1 and found[-1].isdigit():
        del found[-1]
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Name:
    """A leaf's own name and those above it, each as words joined by "_".

    Attributes:
      leaf: the name of the leaf: ``"kernel"``, ``"scale"``, ``"w_q"``.
      owner: the module that owns the leaf, ``""`` at the top.
      above: the names above the owner, outermost first. Indices of lists do not count,
        here and elsewhere.
    """

    leaf: str
    owner: str
    above: tuple[str, ...]


@functools.lru_cache(maxsize=1 << 16)
def name_of(path: str) -> Name:
    """The names of a path.

    >>> name_of("decoder/layers/3/LayerNorm_0/scale")
    Name(leaf='scale', owner='layer_norm', above=('decoder', 'layers'))
    """
    found = ["_".join(words(part)) for part in components(path) if not part.isdigit()]
    found = [name for name in found if name]
    leaf = found.pop() if found else ""
    owner = found.pop() if found else ""
    return Name(leaf, owner, tuple(found))


def pattern_of(path: str) -> str:
    """The path with every number replaced by "*", the same for layers alike."""
    return re.sub(r"\d+", "*", path)
