"""Before the first step: is what runs what was asked for, on every rank?"""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale import distributed
from hfscale.callbacks.trainer_access import calling_trainer
from hfscale.errors import StrategyMismatchError
from hfscale.logs import get_logger
from hfscale.strategy import check_launch, check_strategy, describe_strategy

logger = get_logger(__name__)


class CommHealthCallback(TrainerCallback):
    """Stops a run whose strategy, world size or model wrapper is not the one asked for.

    Logs no metric keys.

    Raises:
        StrategyMismatchError: when the Trainer is made (number of processes) or training begins (strategy, wrapper,
            ranks that disagree).
    """

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_launch(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        check_launch(args)
        strategy = check_strategy(trainer)
        steps = [row[0] for row in distributed.gather_rows([state.global_step])]
        if len(set(steps)) > 1:
            raise StrategyMismatchError(
                f"the ranks start at different steps {[int(step) for step in steps]}: they do not see the same "
                "output_dir; put it on storage that every machine shares"
            )
        logger.info("strategy %s on %d processes (%s)", strategy, args.world_size, args.device.type)
        if args.world_size > 1:
            logger.info("each rank: %s", describe_strategy(trainer))
