"""SampleGenerationCallback: what the model answers to the same prompts as the training goes on."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hfscale.core import distributed
from hfscale.core.best_effort import best_effort
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.core.phases import COMPUTE, EVALUATE
from hfscale.core.records import WRITING, append_record, begin_lines
from hfscale.errors import HfScaleError, UsageError
from hfscale.metrics.added_options import SampleOptions
from hfscale.metrics.prompts import Prompt
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.generation import (
    generates_together,
    generation_mode,
    reason_not_to_generate,
    stop_tokens,
)
from hfscale.trainer.state import output_folder

logger = get_logger(__name__)

SAMPLES_NAME = "samples.jsonl"
"""File in the output directory with one line per generation."""
_SHOWN_CHARACTERS = 300


class SampleGenerationCallback(AdapterCallback):
    """Generates from the same prompts every few steps, and logs prompt and generation.

    They are written to the log (shortened), to `output_dir/samples.jsonl`, and to the table `samples` of the W&B run
    if there is one. The callback logs no metric keys. Put it after `ScalingCallback`, which counts its time as
    evaluation.

    The prompts are split over the ranks. Under FSDP2 and ZeRO-3 all ranks generate together, since each forward
    gathers the weights. The training is not affected: random number generators and training mode are restored. If a
    generation fails, the training ends with its error.

    Args:
        **options: the options, see below.

    Raises:
        UsageError: there are no prompts, or a number is out of range. When the training begins: the strategy or the
            model cannot generate, the Trainer has no tokenizer, or a prompt is too long.
        HfScaleError: a rank could not generate.
    """

    @takes_options(SampleOptions)
    def __init__(self, options: SampleOptions) -> None:
        self.options = options
        self.prompts = list(options.prompts)
        self._begin_run()

    def _begin_run(self) -> None:
        self._texts: list[str] = []
        self._ids: list[list[int]] = []
        self._config: GenerationConfig | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = TrainerAdapter.current().trainer
        reason = reason_not_to_generate(trainer)
        if reason is not None:
            raise UsageError(
                f"no samples can be generated during the training: {reason}; leave the prompts out"
            )
        tokenizer = trainer.processing_class
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise UsageError("samples need a tokenizer: pass it to the Trainer as processing_class")
        self._begin_run()
        for number, prompt in enumerate(self.prompts, start=1):
            text = _rendered(prompt, tokenizer, number)
            self._texts.append(text)
            self._ids.append(
                tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
            )
        self._config = self._generation_config(kwargs["model"], tokenizer)
        if state.is_world_process_zero:
            with best_effort(WRITING, output_folder(args) / SAMPLES_NAME):
                begin_lines(output_folder(args) / SAMPLES_NAME, state.global_step)

    def _generation_config(
        self, model: Any, tokenizer: PreTrainedTokenizerBase
    ) -> GenerationConfig:
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        lengths = [len(ids) for ids in self._ids]
        if 0 in lengths:
            raise UsageError(f"prompt {lengths.index(0) + 1} has no tokens: remove it")
        new_tokens = self.options.max_new_tokens
        if positions is not None:
            longest = max(lengths)
            if longest >= positions:
                raise UsageError(
                    f"prompt {lengths.index(longest) + 1} has {longest} tokens and the model {positions} positions: "
                    "shorten it"
                )
            new_tokens = min(new_tokens, positions - longest)
        stops = stop_tokens(model.generation_config, tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
        sampling = (
            {"temperature": self.options.temperature, "top_k": 0, "top_p": 1.0}
            if self.options.temperature
            else {}
        )
        return GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=self.options.temperature > 0,
            num_beams=1,
            use_cache=True,
            eos_token_id=stops or None,
            pad_token_id=pad,
            **sampling,
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self.options.every_steps:
            return
        adapter = TrainerAdapter.current()
        adapter.phase_ended(COMPUTE)
        samples = self.generate(adapter.trainer)
        if state.is_world_process_zero:
            self._write(output_folder(args) / SAMPLES_NAME, state, samples)
        adapter.phase_ended(EVALUATE)

    def generate(self, trainer: Any) -> list[dict[str, Any]]:
        """Generate from all prompts. Every rank must call it at the same point, within `train`.

        A rank that waits here for another is generating for the hang watch, which knows this method by its name.

        Args:
            trainer (`Trainer`): the Trainer.

        Returns:
            `list[dict]`: for each prompt `prompt`, `generation`, `new_tokens` and `finished` (whether the model ended
            it), on every rank.

        Raises:
            HfScaleError: a rank could not generate.
        """
        together = generates_together(trainer)
        ranks = trainer.args.world_size
        rank = trainer.args.process_index
        mine = range(rank, len(self.prompts), ranks)
        calls = -(-len(self.prompts) // ranks)
        answers: dict[int, dict[str, Any]] = {}
        error = None
        try:
            with generation_mode(trainer) as model, torch.no_grad():
                for call in range(calls if together else len(mine)):
                    # A rank without a prompt of its own repeats the last one, as the others need it in each forward.
                    index = mine[call] if call < len(mine) else len(self.prompts) - 1
                    answers[index] = self._answer(
                        model, index, trainer.processing_class, together=together
                    )
        except Exception as failure:
            # The others wait in a forward: the launcher ends them
            if together or not distributed.is_distributed():
                raise
            error = failure
        message = f"{type(error).__name__}: {error}" if error else None
        gathered = TRAINING.gather(
            "samples", [message, {i: answers[i] for i in mine if i in answers}]
        )
        for failed, (text, _) in enumerate(gathered):
            if text is not None:
                raise HfScaleError(f"rank {failed} could not generate samples: {text}") from error
        by_index = {int(index): answer for _, part in gathered for index, answer in part.items()}
        return [by_index[index] for index in range(len(self.prompts))]

    def _answer(self, model: Any, index: int, tokenizer: Any, *, together: bool) -> dict[str, Any]:
        ids = torch.tensor([self._ids[index]], device=model.device)
        if self.options.temperature:
            torch.manual_seed(self.options.seed + index)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._config,
            synced_gpus=together,
        )
        new = output[0, ids.shape[1] :].tolist()
        stops = self._config.eos_token_id or [] if self._config is not None else []
        return {
            "prompt": self._texts[index],
            "generation": tokenizer.decode(new, skip_special_tokens=True),
            "new_tokens": len(new),
            "finished": bool(new) and new[-1] in stops,
        }

    def _write(self, path: Path, state: TrainerState, samples: list[dict[str, Any]]) -> None:
        for number, sample in enumerate(samples, start=1):
            with best_effort(WRITING, path):
                append_record(
                    path, {"step": state.global_step, "sample": number, **sample}, verbatim=True
                )
            logger.info(
                "step %d, sample %d: %s -> %s",
                state.global_step,
                number,
                _shortened(sample["prompt"]),
                _shortened(sample["generation"]),
            )
        _log_samples(state.global_step, samples)


def _rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UsageError(
            f"prompt {number} is a conversation and the tokenizer has no chat template: give one"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(prompt["messages"]),
                tools=prompt.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
            )
        )
    except Exception as error:
        raise UsageError(f"the chat template refuses prompt {number}: {error}") from error


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN_CHARACTERS else words[:_SHOWN_CHARACTERS] + "…"


def _log_samples(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
    """Log generations, which have the same keys, as the table `samples` of this process's W&B run, if it has one."""
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None or not samples:
        return
    columns = ["step", *samples[0]]
    rows = [[step, *sample.values()] for sample in samples]
    table = wandb.Table(columns=columns, data=rows)
    wandb.log({"samples": table, "train/global_step": step})
