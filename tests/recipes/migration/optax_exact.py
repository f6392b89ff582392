"""Optax's Muon, with its dimension numbers, mask and NAdam, number by number."""

import optax

import muon2_optax as m2


def muon_as_in_optax(
    params, rate, dims, mask, adam_rate, adam_b2, weight_decay, adam_weight_decay
):
    return m2.muon(
        rate,
        bias_correction=True,
        weight_decay=weight_decay,
        weight_decay_mask=mask,
        rules=m2.MatrixRules.from_dimension_numbers(dims, params=params),
        rest=optax.nadamw(adam_rate, b2=adam_b2, weight_decay=adam_weight_decay),
    )
