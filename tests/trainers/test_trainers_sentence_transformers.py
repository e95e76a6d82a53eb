"""The contract on sentence-transformers' Trainers."""

from kinds_sentence_transformers import KINDS
from trainer_contract import TrainerContract


class TestSentenceTransformers(TrainerContract):
    kinds = KINDS
    module = "kinds_sentence_transformers"
