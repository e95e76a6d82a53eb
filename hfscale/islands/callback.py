"""Training on several islands of GPUs that are joined by slow links: DiLoCo for any Trainer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.contents import outer_state_name
from hfscale.core import distributed
from hfscale.core.activity import activity
from hfscale.core.collectives import ISLANDS
from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.core.replicas import Replicas
from hfscale.errors import CheckpointError, HealthError
from hfscale.facts.compression import Compression
from hfscale.facts.support import check_support
from hfscale.islands.client import (
    IslandClient,
    PendingRound,
    Reply,
    on_thread,
    own_token,
)
from hfscale.islands.contributions import finite_contributors
from hfscale.islands.data import continue_data_at, island_share, read_share_of_epoch
from hfscale.islands.options import IslandOptions, parse_address
from hfscale.islands.outer import OUTER_LR, OUTER_MOMENTUM, OuterOptimizer
from hfscale.islands.parameters import PartOfParameters
from hfscale.islands.terms import digest_of, terms_of_model
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.state import global_batch_size, jump_to, model_of, saved_state, steps_per_epoch
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

_NAME = "islands"  # of the state in a checkpoint
_CONNECT_S = 120.0
"""Seconds to reach the rendezvous at the start; island 0, which starts it, may be slower than the others."""


class DiLoCoCallback(AdapterCallback):
    """Trains on several islands, which exchange only every `every_steps` steps (DiLoCo, arXiv 2311.08105).

    An island is one launch under any strategy. It trains by itself; then the islands average what they have changed
    (the pseudo-gradients), rank by rank, and step their common parameters with an outer optimizer (Nesterov). The
    averaging is done in fp32 in host memory. All islands continue with equal parameters, to the last bit.

    Each island reads its own share of the training data, without overlap. The global batch is that of one island: the
    learning rate is scaled with it. Set HFSCALE_ISLAND_TOKEN to the same secret on all islands. Put the callback after
    `ScalingCallback` in the list; its checkpoints then also hold the outer optimizer.

    An island that is late or dies does not stop the others. When it is launched again, it takes parameters and outer
    state from another island and continues at their step. If the rendezvous is lost, each island trains alone; before
    its next round island 0 starts the rendezvous again, and all join it.

    | metric key | unit | meaning |
    |---|---|---|
    | `islands/round_s` | s | time that training waited for the last round |
    | `islands/bytes` | bytes | sent by this process to other islands since the last log |
    | `islands/stall_fraction` | ratio | share of the time since the last log that went into rounds |
    | `islands/drift` | ratio | RMS distance of the islands from their mean before averaging / norm of the parameters |
    | `islands/contributors` | count | islands whose pseudo-gradients the last round has averaged |
    | `islands/dropped_samples` | count | samples so far whose gradients no round has averaged, of all islands |
    | `islands/dropped_contributions` | count | contributions so far that had NaN or infinity, and were dropped |

    Args:
        **options: the options, see below.

    Raises:
        UsageError: a number is out of range, the token is not set, or, when training begins, the islands differ in
            model, weights that are not trained, tokenizer, shapes of the shards, flags or version.
        HealthError: the rendezvous cannot be reached when training begins.
    """

    @takes_options(IslandOptions)
    def __init__(self, options: IslandOptions) -> None:
        self.options = options
        self.compression = options.compression or Compression()
        self.outer_lr = OUTER_LR
        self.outer_momentum = OUTER_MOMENTUM
        if self.compression.density is not None:  # the error feedback stands in for the momentum
            self.outer_lr = 1.0
            self.outer_momentum = 0.0
        if options.outer_lr is not None:
            self.outer_lr = options.outer_lr
        if options.outer_momentum is not None:
            self.outer_momentum = options.outer_momentum
        self._begin_run()

    def _begin_run(self) -> None:
        self._adapter: TrainerAdapter | None = None
        self._part: PartOfParameters | None = None
        self._replicas: Replicas | None = None
        self._outer: OuterOptimizer | None = None
        """On the leader of each part only."""
        self._client: IslandClient | None = None
        """The same."""
        self._is_joined = False
        self._pending: PendingRound | None = None
        self._anchor = 0
        self._epoch = 0
        """Number of the next epoch of this island's data."""
        self._keys_of_round: dict[str, float] = {}
        self._stall_s = 0.0
        self._round_s = 0.0
        self._logged_at = 0.0
        self._logged_bytes = 0

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_init_end(args, state, control, **kwargs)
        if self.options.islands == 1:
            return
        own_token()
        adapter = TrainerAdapter.current()
        if adapter.trainer.train_dataset is not None:
            share = island_share(
                adapter.trainer.train_dataset,
                islands=self.options.islands,
                island=self.options.island_rank,
            )
            adapter.share_train_dataset(share)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin_run()
        adapter = TrainerAdapter.current()
        if self.options.islands == 1:
            return
        self._adapter = adapter
        callbacks = adapter.trainer.callback_handler.callbacks
        run = replace(
            Strategy.of(adapter.trainer).combination(),
            islands=self.options.islands,
            average=any(getattr(each, "averages_weights", False) for each in callbacks),
            batch_schedule=adapter.announced.grows_batch,
            skip_bad_batches=adapter.announced.skip_bad_batches,
            base_width=adapter.announced.base_width,
        )
        check_support(run, "islands")
        self._part = PartOfParameters(adapter.trainer, self.options.fragments)
        parameters = sum(parameter.numel() for parameter in model_of(adapter.trainer).parameters())
        # Of the largest pipeline stage: a number that all ranks have, and of which islands must have the same.
        held = (
            ISLANDS.gather_numbers("islands: model", [self._part.layers, parameters])
            .amax(dim=0)
            .tolist()
        )
        layers, parameters = map(int, held)
        if self.options.fragments > layers:
            rule = f"it must be at most the {layers} layers of the model"
            raise self.options.error("fragments", rule)
        layout = self._part.describe()
        self._replicas = Replicas(ISLANDS, "islands: parts", layout)
        values = self._part.read()
        digests = ISLANDS.gather(
            "islands: frozen", self._replicas.is_leader and self._part.digest_of_frozen()
        )
        frozen = digest_of([one for one in digests if one])
        self._anchor = state.global_step
        self._epoch = state.global_step // max(steps_per_epoch(adapter.trainer), 1)
        if self._replicas.is_leader:
            self._outer = OuterOptimizer(
                values,
                lr=self.outer_lr,
                momentum=self.outer_momentum,
                compression=self.compression,
                sizes=self._part.sizes,
            )
            adapter.announced.tensors[_NAME] = self._outer.state_dict
        self._restore(state)
        adapter.at_training_end(self._disconnect)
        adapter.add_metrics(self._keys)
        self._logged_at = time.monotonic()
        if self._outer is not None:
            self._client = IslandClient(
                parse_address(self.options.rendezvous or ""),
                self._hello(layout, parameters, frozen, state),
                starts_rendezvous=self.options.island_rank == 0 and distributed.rank() == 0,
            )
        reply = self._join(_CONNECT_S)
        if reply is None:
            raise HealthError(
                f"the connection to the rendezvous {self.options.rendezvous} was lost at the start: start again"
            )
        if reply.kind == "state":
            before = state.global_step
            self._take_state(reply, state)
            # Trainer takes one step before it looks; it is undone there
            if state.global_step >= state.max_steps:
                state.global_step = state.max_steps - 1
            self._continue_data(before, state)
        logger.info(
            "island %d of %d: a round of %s every %d steps; the global batch of %d sequences is that of this island, "
            "and the learning rate follows it",
            self.options.island_rank,
            self.options.islands,
            "all parameters"
            if self.options.fragments == 1
            else f"each of {self.options.fragments} fragments",
            self.options.every_steps,
            global_batch_size(adapter.trainer),
        )

    def _continue_data(self, before: int, state: TrainerState) -> None:
        """Read on where the steps of this island are now: what it has read before it ended is not read again."""
        assert self._adapter is not None
        trainer = self._adapter.trainer
        step = state.global_step
        steps = steps_per_epoch(trainer)
        samples = global_batch_size(trainer)
        if step <= before:
            return
        epoch = continue_data_at(
            trainer.callback_handler.train_dataloader,
            step,
            before=before // steps * steps if trainer.args.ignore_data_skip and steps else before,
            steps_per_epoch=steps,
            samples_per_step=samples,
            accumulation=trainer.args.gradient_accumulation_steps,
        )
        if epoch is not None:
            self._epoch = epoch
        else:
            logger.warning(
                "the data of this island continue at step %d and not at step %d: up to %d samples are read again",
                before,
                step,
                (step - before) * samples,
            )

    def _restore(self, state: TrainerState) -> None:
        """Restore the outer state of a checkpoint, if training resumes from one that has it on all ranks."""
        saved = saved_state(state, _NAME)
        assert self._adapter is not None
        checkpoint = self._adapter.resumes_from
        why_not = None
        if "anchor" in saved and saved.get("fragments", 1) != self.options.fragments:
            why_not = f"the number of fragments was {saved.get('fragments', 1)} and is {self.options.fragments}"
        elif self._outer is not None and checkpoint is not None:
            try:
                path = Path(checkpoint) / outer_state_name(_NAME)
                self._outer.load_state_dict(safetensors.torch.load_file(path))
            except FileNotFoundError:
                why_not = "the checkpoint has no outer state"
            except CheckpointError as error:
                why_not = str(error)
        reasons = [
            reason
            for reason in ISLANDS.gather("islands: checkpoint", why_not)
            if reason is not None
        ]
        if checkpoint is None or reasons or "anchor" not in saved:
            if checkpoint is not None:
                logger.warning(
                    "the outer optimizer starts anew: %s", (reasons or ["no islands wrote it"])[0]
                )
                assert self._part is not None
                values = self._part.read()
                if self._outer is not None:
                    self._outer.reset(values)
            saved.clear()
            saved |= {
                "anchor": state.global_step,
                "dropped_samples": 0,
                "fragments": self.options.fragments,
            }
        self._anchor = saved["anchor"]
        before = saved.setdefault("islands", self.options.islands)
        if before != self.options.islands:
            self._report_new_split(before, state)
            saved["islands"] = self.options.islands

    def _report_new_split(self, before: int, state: TrainerState) -> None:
        """Log what a change of the number of islands means for the samples of this epoch."""
        assert self._adapter is not None
        steps = steps_per_epoch(self._adapter.trainer) * self.options.islands
        trained = before * state.global_step % steps if steps else before * state.global_step
        logger.warning(
            "the checkpoint is of %d islands, and now there are %d: the outer state is kept, and the data are split "
            "anew; %d samples of this epoch were trained; some are read again, and as many others are not",
            before,
            self.options.islands,
            trained * global_batch_size(self._adapter.trainer),
        )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._part is None:
            return
        read_share_of_epoch(
            kwargs["train_dataloader"], island=self.options.island_rank, epoch=self._epoch
        )
        self._epoch += 1

    def _hello(
        self, layout: str, parameters: int, frozen: str, state: TrainerState
    ) -> dict[str, Any]:
        assert self._adapter is not None
        assert self._outer is not None
        assert self._replicas is not None
        return {
            "island": self.options.island_rank,
            "part": self._replicas.part,
            "parts": self._replicas.parts,
            "islands": self.options.islands,
            "quorum": self.options.quorum,
            "deadline_s": self.options.deadline_s,
            "terms": {
                **terms_of_model(self._adapter.trainer, parameters, frozen),
                "islands": self.options.islands,
                "steps between rounds": self.options.every_steps,
                "overlap steps": self.options.overlap_steps,
                "fragments": self.options.fragments,
                "last step": state.max_steps,
                "outer learning rate": self.outer_lr,
                "outer momentum": self.outer_momentum,
                "compression": str(self.compression),
                "parts": self._replicas.parts,
            },
            "layout": digest_of(layout),
            "max_bytes": max(
                self._outer.state_bytes, self.compression.bytes_of(self._outer.anchor.numel())
            ),
        }

    # --- rounds -----------------------------------------------------------------------------------------------------

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._part is None:
            return
        if self._anchor >= state.max_steps:  # the others had ended before this training began
            self._continue_from_anchor()
            return
        is_last = state.global_step >= state.max_steps
        begins = self._slots(state.global_step) > self._slots(state.global_step - 1) or is_last
        ends = self._pending is not None and (
            is_last or state.global_step - self._pending.step >= self.options.overlap_steps
        )
        if not begins and not ends:
            return
        began = time.monotonic()
        if ends:
            self._end_round(state)
        if begins and self._anchor < state.global_step:  # not if the other islands had ended
            self._begin_round(state, in_background=self.options.overlap_steps > 0 and not is_last)
            if self.options.overlap_steps == 0 or is_last:
                self._end_round(state)
        seconds = time.monotonic() - began
        self._stall_s += seconds
        self._round_s += seconds
        if self._pending is None:
            self._keys_of_round["islands/round_s"] = self._round_s
            self._round_s = 0.0
        if state.global_step >= state.max_steps:  # it may have jumped there
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"

    def _slots(self, step: int) -> int:
        """Return how many rounds are due up to a step."""
        return step * self.options.fragments // self.options.every_steps

    def _fragment(self, state: TrainerState) -> int | None:
        """Return the fragment of the round after the last one; None, all of them, for the last round.

        It follows from the last round, not from the own step: islands with the same anchor have the same one.
        """
        return (
            None
            if state.global_step >= state.max_steps
            else self._slots(self._anchor) % self.options.fragments
        )

    @activity("exchanging")
    def _begin_round(self, state: TrainerState, *, in_background: bool) -> None:
        assert self._part is not None
        if not self._is_joined:
            reply = self._join(0.0)
            if reply is None:
                logger.warning(
                    "the rendezvous is not there: this island trains alone until it is back"
                )
                return
            if reply.kind == "state":
                self._take_state(reply, state)
                return
        fragment = self._fragment(state)
        values = self._part.read(fragment)
        payload = (
            self._outer.pseudo_gradient(values, fragment).numpy()
            if self._outer is not None
            else b""
        )
        exchange = partial(
            IslandClient.exchange, step=state.global_step, anchor=self._anchor, payload=payload
        )
        self._pending = PendingRound(step=state.global_step, fragment=fragment, exchange=exchange)
        if in_background and self._client is not None:
            self._pending.reply = on_thread(partial(exchange, self._client))

    @activity("exchanging")
    def _end_round(self, state: TrainerState) -> None:
        """Wait for the exchange of the round, and take its result."""
        pending, self._pending = self._pending, None
        if pending is None:  # this island trains alone
            return
        reply = self._together("islands: round", pending.run)
        while reply is not None and reply.kind == "go":  # the islands that were ahead have ended
            reply = self._together("islands: round", pending.exchange)
        counts = (
            reply is not None
            and reply.kind == "round"
            and self.options.island_rank in reply.contributors
        )
        if self._outer is not None and not counts:
            self._outer.withdraw(anchor_stays=reply is None or reply.kind == "ahead")
        if reply is None:
            logger.warning(
                "round %d: the connection is lost; this island trains alone", pending.step
            )
        elif reply.kind == "state":
            self._take_state(reply, state)
        elif reply.kind == "ahead":
            self._catch_up(reply.anchor, state)
        else:
            self._average(reply, state, pending)

    def _catch_up(self, step: int, state: TrainerState) -> None:
        """Take part in a round of islands that are at a later step than this one."""
        assert self._adapter is not None
        logger.warning(
            "this island continues at step %d, where the others are, with what it has trained", step
        )
        jump_to(self._adapter.trainer, step)
        self._begin_round(state, in_background=False)
        self._end_round(state)

    def _average(self, reply: Reply, state: TrainerState, pending: PendingRound) -> None:
        """Take the outer step of a round that has closed, with the contributions that are finite."""
        assert self._adapter is not None
        received = []
        if self._outer is not None:
            payloads = reply.payloads or {}
            received = self._outer.decode([payloads.get(island) for island in reply.contributors])
        counted = finite_contributors(reply, received)
        saved = saved_state(state, _NAME)
        steps = reply.anchor - self._anchor
        missing = self.options.islands - len(counted)
        saved["dropped_samples"] += missing * steps * global_batch_size(self._adapter.trainer)
        saved["dropped_contributions"] = (
            saved.get("dropped_contributions", 0) + len(reply.contributors) - len(counted)
        )
        if self.options.island_rank not in reply.contributors:
            logger.warning(
                "round %d: this island was late; its last %d steps are dropped", reply.anchor, steps
            )
        elif missing:
            logger.info(
                "round %d: %d of %d islands", reply.anchor, len(counted), self.options.islands
            )
        is_dropped = (
            self.options.island_rank in reply.contributors
            and self.options.island_rank not in counted
        )
        spread = size = 0.0
        if self._outer is not None:
            if is_dropped:
                self._outer.drop()
            values = zip(reply.contributors, received, strict=True)
            spread, size = self._outer.step(
                [value for island, value in values if island in counted]
            )
        spread, size = ISLANDS.gather_numbers("islands: drift", [spread, size]).sum(dim=0).tolist()
        self._keys_of_round = {
            "islands/contributors": float(len(counted)),
            **({"islands/drift": (spread / size) ** 0.5} if size > 0 else {}),
        }
        self._anchor = saved["anchor"] = reply.anchor
        self._continue_from_anchor(
            pending.fragment, keeps_steps=state.global_step > pending.step and not is_dropped
        )
        self._send_state(reply)

    def _take_state(self, reply: Reply, state: TrainerState) -> None:
        """Continue from the outer state of another island, at its step."""
        assert self._adapter is not None
        if self._outer is not None:
            assert reply.state is not None
            self._outer.take_shared_state(reply.state)
        saved = saved_state(state, _NAME)
        saved["dropped_samples"] += max(reply.anchor - self._anchor, 0) * global_batch_size(
            self._adapter.trainer
        )
        self._anchor = saved["anchor"] = reply.anchor
        self._continue_from_anchor()
        logger.warning(
            "this island has taken the parameters of another one, of step %d", reply.anchor
        )
        if reply.anchor > state.global_step:
            jump_to(self._adapter.trainer, reply.anchor)

    @activity("exchanging")
    def _continue_from_anchor(
        self, fragment: int | None = None, *, keeps_steps: bool = False
    ) -> None:
        """Set the parameters of this island to the anchor, plus what it has trained since the round began if asked.

        Args:
            fragment (`int`, *optional*): only those of this fragment; None: all.
            keeps_steps (`bool`): whether to add what was trained; then it is the fragment of the last round.
        """
        assert self._part is not None
        assert self._replicas is not None
        own = self._part.read(fragment) if keeps_steps else self._part.empty(fragment)
        if self._outer is not None:
            own = self._outer.continued(own) if keeps_steps else self._outer.anchor_of(fragment)
        self._replicas.send(own)
        self._part.write(own, fragment)

    def _send_state(self, reply: Reply) -> None:
        if reply.send_state and self._client is not None and self._outer is not None:
            try:
                self._client.send_state(self._anchor, self._outer.shared_state())
            except OSError as error:  # the next round reports it
                logger.warning("the outer state could not be sent to another island: %s", error)
                self._client.disconnect()

    # --- the connection ---------------------------------------------------------------------------------------------

    @activity("exchanging")
    def _join(self, timeout_s: float) -> Reply | None:
        """Connect all parts of this island; None if the rendezvous is lost. Every rank must call it."""

        def join(client: IslandClient) -> Reply:
            assert self._outer is not None
            try:
                return client.join(
                    anchor=self._anchor, digest=self._outer.digest(), timeout_s=timeout_s
                )
            except HealthError as error:
                if timeout_s > 0:
                    raise
                raise ConnectionError(str(error)) from error

        reply = self._together("islands: join", join)
        self._is_joined = reply is not None
        if reply is not None and reply.kind == "go":
            self._send_state(reply)
        return reply

    def _together(self, name: str, call: Callable[[IslandClient], Reply]) -> Reply | None:
        """Call `call` on the leader of each part; return its reply, of which all ranks know all but the payloads.

        It returns None on all ranks if a part has lost its connection: then the island leaves the round as a whole.
        """
        reply = None
        with ISLANDS.agreed(name):
            if self._client is not None:
                try:
                    reply = call(self._client)
                except OSError as error:
                    logger.info("%s: %s", name, error)
        own = reply and [reply.kind, reply.anchor, list(reply.contributors), reply.send_state]
        answers = ISLANDS.gather(f"{name}: answers", [self._client is not None, own])
        replies = [answer for is_leader, answer in answers if is_leader]
        if any(answer is None or answer != replies[0] for answer in replies):
            self._disconnect()
            return None
        if reply is not None:
            return reply
        kind, anchor, contributors, _ = replies[0]
        return Reply(kind=kind, anchor=anchor, contributors=tuple(contributors))

    def _disconnect(self) -> None:
        self._is_joined = False
        if self._client is not None:
            self._client.disconnect()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._client is not None:
            self._client.leave()
        if self._part is not None:
            dropped = saved_state(state, _NAME)["dropped_samples"]
            if dropped:
                logger.warning(
                    "%d samples were dropped: their islands were away or late, or not finite",
                    dropped,
                )
        self._is_joined = False

    # --- metrics ----------------------------------------------------------------------------------------------------

    def _keys(self, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        now = time.monotonic()
        sent = self._client.sent_bytes if self._client is not None else 0
        keys = {
            "islands/bytes": float(sent - self._logged_bytes),
            "islands/stall_fraction": self._stall_s / max(now - self._logged_at, 1e-9),
            "islands/dropped_samples": float(saved_state(state, _NAME)["dropped_samples"]),
            "islands/dropped_contributions": float(
                saved_state(state, _NAME).get("dropped_contributions", 0)
            ),
            **self._keys_of_round,
        }
        self._logged_at = now
        self._logged_bytes = sent
        self._stall_s = 0.0
        self._keys_of_round = {}
        return keys
