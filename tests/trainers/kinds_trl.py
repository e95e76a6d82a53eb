"""Kinds of TRL's Trainers, on a tiny Llama and a tokenizer of a hundred words that is made here."""

import functools
import importlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from kinds_transformers import LLAMA
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_contract import VOCAB, Kind, launched
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback

SPECIAL = ("<pad>", "<unk>", "</s>", "<user>", "<assistant>")
WORDS = tuple(f"word{number}" for number in range(VOCAB - len(SPECIAL)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
    "{% generation %}{{ message.content }} </s>{% endgeneration %}"
    "{% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, with a chat template that marks what the assistant says."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *WORDS))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=64
    )
    made.chat_template = CHAT_TEMPLATE
    return made


@functools.cache
def model_folder(kind: str = "LlamaForCausalLM") -> str:
    """Return a folder with a tiny Llama: some Trainers load a model a second time, as their reference."""
    folder = tempfile.mkdtemp()
    transformers.set_seed(0)
    sizes = {"eos_token_id": 2, "bos_token_id": None}
    if kind == "LlamaForSequenceClassification":
        sizes["num_labels"] = 1
    getattr(transformers, kind)(transformers.LlamaConfig(**(LLAMA | sizes))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def say(numbers: random.Random, longest: int = 6) -> str:
    """Return a few random words."""
    return " ".join(numbers.choices(WORDS, k=numbers.randint(2, longest)))


def chat(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a conversation."""
    return {"messages": [ask(numbers), answer(numbers), ask(numbers), answer(numbers)]}


def ask(numbers: random.Random) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": say(numbers)}


def answer(numbers: random.Random) -> dict[str, str]:
    """Return an assistant's message."""
    return {"role": "assistant", "content": say(numbers)}


def completed(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a prompt and its completion."""
    return {"prompt": say(numbers), "completion": say(numbers)}


def preferred(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a better and a worse answer."""
    return {"prompt": [ask(numbers)], "chosen": [answer(numbers)], "rejected": [answer(numbers)]}


def labelled(numbers: random.Random) -> dict[str, Any]:
    """Return a row with an answer and whether it is good."""
    return {"prompt": [ask(numbers)], "completion": [answer(numbers)], "label": numbers.random() < 0.5}


def asked(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a prompt only."""
    return {"prompt": [ask(numbers)]}


def referenced(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a better and a worse answer, and one to imitate."""
    return preferred(numbers) | {"reference": [answer(numbers)]}


def demonstrated(numbers: random.Random) -> dict[str, Any]:
    """Return a row with a prompt, and what the teacher knows in addition."""
    return asked(numbers) | {"privileged_context": say(numbers)}


def lora(task: str = "CAUSAL_LM") -> LoraConfig:
    """Return the config of a small adapter."""
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type=task)


def count_words(completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward different words."""
    return [float(len(set(str(completion).split()))) for completion in completions]


def guess(completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward half of the completions: 0 or 1."""
    return [float(len(str(completion).split()) % 2) for completion in completions]


def teacher() -> dict[str, Any]:
    """Return a teacher: another model with the same words."""
    transformers.set_seed(1)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | {"num_hidden_layers": 3})))
    made.config._name_or_path = model_folder()  # where IW-OPD reads the teacher's tokenizer
    return {"teacher_model": made}


def rewarded() -> dict[str, Any]:
    """Return the reward."""
    return {"reward_funcs": count_words}


def builder(
    trainer: str,
    row: Callable[[random.Random], dict[str, Any]],
    *,
    model: str = "LlamaForCausalLM",
    options: Callable[[], dict[str, Any]] = dict,
    home: str = "trl",
    streams: bool = False,
    **arguments: Any,
) -> Callable[..., Trainer]:
    """Return the `build` of a kind: TRL's Trainer `trainer` of the module `home` on rows of random words."""

    def build(folder: Path, callbacks: list[TrainerCallback], *, args: Any = None, **given: Any) -> Trainer:
        module = importlib.import_module(home)  # takes seconds

        def rows(size: int) -> Dataset:
            numbers = random.Random(0)
            return Dataset.from_list([row(numbers) for _ in range(size)])

        train = rows(24)
        return getattr(module, f"{trainer}Trainer")(
            model=getattr(transformers, model).from_pretrained(model_folder(model)),
            args=args or launched(getattr(module, f"{trainer}Config")(**({"bf16": False} | arguments | given))),
            train_dataset=train.to_iterable_dataset() if streams else train,
            eval_dataset=rows(4),
            processing_class=tokenizer(),
            callbacks=callbacks,
            **options(),
        )

    return build


GENERATION = {"num_generations": 2, "max_completion_length": 6}
generating = builder("GRPO", asked, options=rewarded, **GENERATION, beta=0.04)


def experimental(
    trainer: str, row: Callable[[random.Random], dict[str, Any]], **others: Any
) -> Callable[..., Trainer]:
    """Return the `build` of a kind of `trl.experimental`, where each trainer has a module of its own."""
    home = f"trl.experimental.{MODULES.get(trainer, trainer.lower())}"
    return builder(trainer, row, home=home, **others)


MODULES = {"OnlineDPO": "online_dpo", "IWOPD": "iw_opd"}
"""Module of a Trainer, where it is not its name in lower case."""

HEAD = {"flops": "TRL computes the head of the model for some of the tokens only"}

KINDS = (
    Kind(
        name="sft",
        trainer="`SFTTrainer`, chat data, assistant-only loss",
        model="causal LM (Llama)",
        build=builder("SFT", chat, assistant_only_loss=True),
        short=True,
        xfail=HEAD,
    ),
    Kind(
        name="sft_lora",
        trainer="`SFTTrainer`, prompts and completions, LoRA",
        model="causal LM (Llama)",
        build=builder("SFT", completed, options=lambda: {"peft_config": lora()}),
        xfail=HEAD,
    ),
    Kind(
        name="sft_packing",
        trainer="`SFTTrainer`, packing",
        model="causal LM (Llama)",
        build=builder("SFT", chat, packing=True, packing_strategy="wrapped", max_length=16, eval_packing=False),
        xfail=HEAD,
    ),
    Kind(
        name="sft_padding_free",
        trainer="`SFTTrainer`, padding-free",
        model="causal LM (Llama)",
        build=builder("SFT", chat, padding_free=True, max_length=None),
        xfail=HEAD,
    ),
    Kind(
        name="sft_stream",
        trainer="`SFTTrainer`, `IterableDataset`",
        model="causal LM (Llama)",
        build=builder("SFT", chat, streams=True),
        xfail=HEAD,
    ),
    Kind(
        name="dpo",
        trainer="`DPOTrainer`",
        model="causal LM (Llama)",
        build=builder("DPO", preferred),
    ),
    Kind(
        name="dpo_lora",
        trainer="`DPOTrainer`, LoRA",
        model="causal LM (Llama)",
        build=builder("DPO", preferred, options=lambda: {"peft_config": lora()}),
    ),
    Kind(
        name="grpo",
        trainer="`GRPOTrainer`",
        model="causal LM (Llama)",
        build=generating,
        padding_is_known=False,
        background=False,  # its Trainer may write a file after the checkpoint
        xfail=HEAD,
    ),
    Kind(
        name="grpo_repeated",
        trainer="`GRPOTrainer`, several steps per generation",
        model="causal LM (Llama)",
        build=builder("GRPO", asked, options=rewarded, **GENERATION, steps_per_generation=3, num_iterations=2),
        padding_is_known=False,
        background=False,  # its Trainer may write a file after the checkpoint
        plain_drifts=True,
        xfail=HEAD,
    ),
    Kind(
        name="rloo",
        trainer="`RLOOTrainer`",
        model="causal LM (Llama)",
        build=builder("RLOO", asked, options=rewarded, **GENERATION),
        padding_is_known=False,
        xfail=HEAD,
    ),
    Kind(
        name="rloo_repeated",
        trainer="`RLOOTrainer`, several steps per generation",
        model="causal LM (Llama)",
        build=builder("RLOO", asked, options=rewarded, **GENERATION, steps_per_generation=3),
        padding_is_known=False,
        plain_drifts=True,
        xfail=HEAD,
    ),
    Kind(
        name="distillation",
        trainer="`DistillationTrainer`",
        model="causal LM (Llama)",
        build=builder("Distillation", asked, options=teacher, max_completion_length=6),
        arguments={"gradient_accumulation_steps": 2},
        padding_is_known=False,
        plain_drifts=True,
    ),
    Kind(
        name="gkd",
        trainer="`GKDTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("GKD", chat, options=teacher, max_new_tokens=6),
        padding_is_known=False,
    ),
    Kind(
        name="gold",
        trainer="`GOLDTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("GOLD", chat, options=teacher, max_completion_length=6, use_extended_uld=False),
        arguments={"gradient_accumulation_steps": 2},
        padding_is_known=False,
        plain_drifts=True,
    ),
    Kind(
        name="iw_opd",
        trainer="`IWOPDTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("IWOPD", chat, options=teacher, max_completion_length=6, max_length=64),
        padding_is_known=False,
    ),
    Kind(
        name="sdft",
        trainer="`SDFTTrainer` (experimental), several steps per generation",
        model="causal LM (Llama)",
        build=experimental("SDFT", demonstrated, **GENERATION, steps_per_generation=3),
        padding_is_known=False,
        plain_drifts=True,
    ),
    Kind(
        name="sdpo",
        trainer="`SDPOTrainer` (experimental), several steps per generation",
        model="causal LM (Llama)",
        build=experimental(
            "SDPO", asked, options=rewarded, **GENERATION, steps_per_generation=3, teacher_model_kind="base"
        ),
        padding_is_known=False,
        plain_drifts=True,
    ),
    Kind(
        name="gmpo",
        trainer="`GMPOTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("GMPO", asked, options=rewarded, **GENERATION),
        padding_is_known=False,
        background=False,  # its Trainer may write a file after the checkpoint
        xfail=HEAD,
    ),
    Kind(
        name="a2po",
        trainer="`A2POTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("A2PO", asked, options=lambda: {"reward_funcs": guess}, max_completion_length=6),
        padding_is_known=False,
    ),
    Kind(
        name="online_dpo",
        trainer="`OnlineDPOTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("OnlineDPO", asked, options=rewarded, max_new_tokens=6),
        arguments={"eval_strategy": "no", "load_best_model_at_end": False},
        padding_is_known=False,
        other_files=("tokenizer.json",),  # its padding is that of the last batch
    ),
    Kind(
        name="orpo",
        trainer="`ORPOTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("ORPO", preferred),
    ),
    Kind(
        name="cpo",
        trainer="`CPOTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("CPO", preferred),
    ),
    Kind(
        name="tpo",
        trainer="`TPOTrainer` (experimental)",
        model="causal LM (Llama)",
        build=experimental("TPO", referenced),
    ),
    Kind(
        name="reward",
        trainer="`RewardTrainer`",
        model="sequence classification (Llama)",
        build=builder("Reward", preferred, model="LlamaForSequenceClassification"),
    ),
    Kind(
        name="reward_lora",
        trainer="`RewardTrainer`, LoRA",
        model="sequence classification (Llama)",
        build=builder(
            "Reward",
            preferred,
            model="LlamaForSequenceClassification",
            options=lambda: {"peft_config": lora("SEQ_CLS")},
        ),
    ),
    Kind(
        name="kto",
        trainer="`KTOTrainer`",
        model="causal LM (Llama)",
        build=builder("KTO", labelled),
    ),
    Kind(
        name="sft_lora_ddp",
        trainer="`SFTTrainer`, LoRA, DDP",
        model="causal LM (Llama)",
        build=builder("SFT", chat, options=lambda: {"peft_config": lora()}),
        processes=2,
    ),
    Kind(
        name="sft_fsdp2",
        trainer="`SFTTrainer`, assistant-only loss, FSDP2",
        model="causal LM (Llama)",
        build=builder("SFT", chat, assistant_only_loss=True, gradient_checkpointing=False),
        processes=2,
        strategy="fsdp2",
        xfail=HEAD,
    ),
    Kind(
        name="dpo_ddp",
        trainer="`DPOTrainer`, DDP",
        model="causal LM (Llama)",
        build=builder("DPO", preferred),
        processes=2,
    ),
    Kind(
        name="dpo_lora_fsdp2",
        trainer="`DPOTrainer`, LoRA, FSDP2",
        model="causal LM (Llama)",
        build=builder("DPO", preferred, options=lambda: {"peft_config": lora()}, gradient_checkpointing=False),
        processes=2,
        strategy="fsdp2",
    ),
    Kind(
        name="dpo_zero2",
        trainer="`DPOTrainer`, ZeRO-2",
        model="causal LM (Llama)",
        build=builder("DPO", preferred, gradient_checkpointing=False),
        processes=2,
        strategy="zero2",
    ),
    Kind(
        name="sft_zero3",
        trainer="`SFTTrainer`, chat data, ZeRO-3",
        model="causal LM (Llama)",
        build=builder("SFT", chat, assistant_only_loss=True, gradient_checkpointing=False),
        processes=2,
        strategy="zero3",
        xfail=HEAD,
    ),
    Kind(
        name="grpo_ddp",
        trainer="`GRPOTrainer`, DDP",
        model="causal LM (Llama)",
        build=generating,
        processes=2,
        padding_is_known=False,
        background=False,  # its Trainer may write a file after the checkpoint
        xfail=HEAD,
    ),
)
