"""Muon² as an optimizer of Levanter; importing this module registers it."""

from dataclasses import dataclass

import optax
from levanter.optim.config import OptimizerConfig

import muon2_optax as m2


@OptimizerConfig.register_subclass("muon2")
@dataclass(frozen=True)
class Muon2Config(OptimizerConfig):
    learning_rate: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def build(self, num_train_steps):
        def optimizer(learning_rate, adam_lr):
            tx = m2.muon2(
                learning_rate,
                weight_decay=self.weight_decay,
                adam_learning_rate=adam_lr,
                rules=m2.ready_rules.levanter(),
            )
            return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), tx)

        return optax.inject_hyperparams(optimizer)(
            learning_rate=self.lr_scheduler(num_train_steps),
            adam_lr=self.lr_scheduler(num_train_steps, override_lr=self.adam_lr),
        )
