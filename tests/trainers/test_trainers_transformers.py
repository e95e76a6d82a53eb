"""The contract on transformers' own Trainers, on their modalities, and on subclasses."""

from kinds_transformers import KINDS
from trainer_contract import TrainerContract


class TestTransformers(TrainerContract):
    kinds = KINDS
    module = "kinds_transformers"
