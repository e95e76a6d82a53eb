"""The contract on TRL's Trainers."""

from kinds_trl import KINDS
from trainer_contract import TrainerContract


class TestTrl(TrainerContract):
    kinds = KINDS
    module = "kinds_trl"
