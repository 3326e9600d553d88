"""Tables the compiler computes itself: float64 inside, rounded once, and the same bits on every machine.

numpy's and the C library's sin, cos and pow differ in their last bit with the instruction set, so none is used here:
frequencies come from decimal arithmetic, sines and cosines from IEEE additions and multiplications alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsc.compiler.ir.weight import Generated
from dsc.runtime.spec import ModelSpec, Yarn

Array = NDArray[Any]
Doubles = NDArray[np.float64]


def rope_table(spec: ModelSpec, context_tokens: int, part: str) -> Generated:
    """The rope table "cos" or "sin" of a model as an expression, float32 [context_tokens, rope / 2]."""
    yarn = spec.yarn
    arguments: dict[str, Any] = {
        "context_tokens": context_tokens,
        "width": spec.qk_rope_head_dim,
        "theta": spec.rope_theta,
        "yarn": None if yarn is None else tuple(vars(yarn).values()),
    }
    return Generated(f"rope_{part}", tuple(arguments.items()), (context_tokens, spec.qk_rope_head_dim // 2))


def expert_map(experts: int, groups: int) -> Generated:
    """Where each expert lies in each group of ranks, as an expression, int32 [groups, experts]."""
    arguments = (("experts", experts), ("groups", groups))
    return Generated("expert_places", arguments, (groups, experts), "int32")


def evaluate(table: Generated) -> Array:
    """The values of a table; KeyError for an unknown function."""
    values = FUNCTIONS[table.function](**dict(table.arguments))
    assert (values.shape, str(values.dtype)) == (table.shape, table.dtype), (table, values.shape, values.dtype)
    return values


def rope_cos(context_tokens: int, width: int, theta: float, yarn: tuple[float, ...] | None) -> Array:
    """cos(position * frequency) * magnitude as float32 [context_tokens, width / 2]; `yarn` as the fields of Yarn."""
    return _rope(context_tokens, width, theta, yarn, part=1)


def rope_sin(context_tokens: int, width: int, theta: float, yarn: tuple[float, ...] | None) -> Array:
    """sin(position * frequency) * magnitude as float32 [context_tokens, width / 2]; `yarn` as the fields of Yarn."""
    return _rope(context_tokens, width, theta, yarn, part=0)


def expert_places(experts: int, groups: int) -> Array:
    """int32 [groups, experts]: place of each expert among those of a group, which has equally many that follow each other;
    -1 for the others.
    """
    places = np.full((groups, experts), -1, np.int32)
    of_group = experts // groups
    for group in range(groups):
        places[group, group * of_group : (group + 1) * of_group] = np.arange(of_group)
    return places


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "rope_cos": rope_cos, "rope_sin": rope_sin, "expert_places": expert_places,
}  # fmt: skip


def _rope(context_tokens: int, width: int, theta: float, fields: tuple[float, ...] | None, part: int) -> Array:
    yarn = None if fields is None else Yarn(*fields)  # type: ignore[arg-type]
    magnitude = 1.0 if yarn is None else yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
    angles = np.arange(context_tokens, dtype=np.float64)[:, None] * rope_frequencies(width, theta, yarn)
    return (sin_cos(angles)[part] * magnitude).astype(np.float32)


def rope_frequencies(width: int, theta: float, yarn: Yarn | None) -> Doubles:
    """Inverse frequencies [width / 2]: theta^(-2i/width), stretched by YaRN where a pair turns too slowly.

    DeepseekV2YarnRotaryEmbedding: pairs below `low` keep their frequency, those above `high` divide it by the factor,
    a linear ramp lies between.
    """
    with localcontext() as context:
        context.prec = 40
        plain = np.array([float(Decimal(theta) ** (Decimal(-2 * i) / width)) for i in range(width // 2)])
    if yarn is None:
        return plain

    def pair_that_turns(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    stretched: Doubles = plain / yarn.factor * ramp + plain * (1.0 - ramp)
    return stretched


def sin_cos(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Sine and cosine of angles in [0, 10^6], to about 1e-16.

    Reduced by quarter turns in Cody and Waite's way (three parts of pi/2, the first two of 33 bits, so that their products
    with the quarter count are exact), then Taylor's series on [-pi/4, pi/4].
    """
    quarters = np.rint(angles * (2 / math.pi))
    assert quarters.size == 0 or quarters.max() < 2**20, "an angle is out of range"
    x = angles
    for piece in _HALF_PI:
        x = x - quarters * piece
    square = x * x
    sine, cosine = np.zeros_like(x), np.zeros_like(x)
    for n in range(17, 1, -2):
        sine = (sine + _signed_factorial(n)) * square
        cosine = (cosine + _signed_factorial(n - 1)) * square
    sine, cosine = x + x * sine, 1.0 + cosine
    turn = quarters.astype(np.int64) % 4
    swapped = turn % 2 == 1
    return (
        np.where(swapped, cosine, sine) * np.where(turn >= 2, -1.0, 1.0),
        np.where(swapped, sine, cosine) * np.where((turn == 1) | (turn == 2), -1.0, 1.0),
    )


def _signed_factorial(n: int) -> float:
    return (-1.0 if n % 4 >= 2 else 1.0) / math.factorial(n)


def _half_pi_parts() -> tuple[float, ...]:
    with localcontext() as context:
        context.prec = 60
        rest = Decimal("1.57079632679489661923132169163975144209858469968755291")
        parts = []
        for bits in (32, 65):
            unit = Decimal(2) ** -bits
            parts.append(float((rest / unit).to_integral_value(rounding="ROUND_FLOOR") * unit))
            rest -= Decimal(parts[-1])
        return (*parts, float(rest))


_HALF_PI = _half_pi_parts()
