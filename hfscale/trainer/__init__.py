"""The contact with transformers' Trainer and Accelerate: adapter, hooks, strategy, state.

`TrainerAdapter` (in `adapter.py`) makes every change to a Trainer, on the instance, and `Changes` (in `changes.py`)
undoes it at the end of the training; those of saves, loads and evaluations are in `checkpoint_changes.py` and
`evaluation_changes.py`. What callbacks tell each other about a training is in `announced.py`. Other packages touch
only what they alone need; their `__init__.py` lists it. `hfscale.core.versions` hides the differences between the
supported versions. `tests/trainer/test_integrations.py` keeps all this true.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Replaced until the end of the training

- `Trainer.train` (public), as long as the Trainer has one of our callbacks. By: `TrainerAdapter.of`. Reason: no
  event reports that a training was broken off by an exception. Test: test_integrations.py, TestRestore.
- `Trainer._run_epoch` and `Trainer._finalize_training` (before transformers 5.4 `Trainer.training_step` and
  `Trainer._finish_current_push`). By: all others, in a training that began before the callback was added. Reason: a
  call of `train` that is already running cannot be wrapped. Test: test_integrations.py, TestAddedLater.
- the order of `Trainer.callback_handler.callbacks`. By: `prepend_callback`, `append_callback`. Reason: reporting
  callbacks run before those of the user and would miss the keys that these add to a log. Test: test_integrations.py,
  test_added_metrics_reach_callbacks_that_come_before.
- `Trainer.log` (public), and the name `store_flos` in the code of the method that calls it. By: `add_metrics`.
  Reason: keys that need values of all ranks must be exchanged where Trainer itself logs, on all ranks; user code may
  log on one. Test: test_collectives.py, test_user_code_may_log_a_loss_on_one_rank_only.
- `Trainer._inner_training_loop`. By: `resumes_from`. Reason: a subclass's `train` may choose the checkpoint, and no
  event passes it on. Test: test_integrations.py, TestResumesFrom.
- `Trainer.get_batch_samples` (public). By: `on_batch`. Reason: there is no event between the fetch of a batch and
  the exchange of token counts. Test: test_integrations.py, test_listeners_hear_of_each_batch_before_the_step.
- `Trainer._maybe_log_save_evaluate`. By: `after_reports`. Reason: there is no event after the reports of a step and
  before the next batch is fetched. Test: test_memory_snapshots.py.
- `Trainer._save_checkpoint`. By: `replace_saving`. Reason: there is no event between the decision to save and the
  writing. Test: test_checkpoint_writer.py.
- `Trainer._get_output_dir`, for the call in `Trainer._save_checkpoint`. By: `run_dir`, `output_dir`,
  `output_dir_replaced`. Reason: `_save_checkpoint` takes no folder. Test: test_checkpoint_writer.py.
- `Trainer._evaluate` and, called, `Trainer._determine_best_metric`. By: `wrap_method`,
  `evaluate_as_in_training`. Reason: an evaluation that a notice cuts short must not move a schedule, and the next
  launch makes it up. Test: test_evaluations.py.
- `Trainer._run_epoch` and `Trainer._finalize_training`. By: `skip_epoch`, `before_finalizing`. Reason: a training
  whose checkpoint has stopped early would take a step more, and no event comes before the best model is loaded. Test:
  test_evaluations.py.
- `Trainer._load_rng_state` and `Trainer._load_optimizer_and_scheduler`, in a training that resumes. By:
  `replace_rng_loading`, `load_states_in`. Reason: Trainer restores the random states after the batches that follow
  have been fetched, and has no list of what it may load. Test: test_data_order.py.
- `Trainer._load_from_checkpoint`, `Trainer._load_optimizer_and_scheduler`, `Trainer._load_rng_state` and
  `Trainer._load_best_model`. By: `replace_loading`. Reason: Trainer cannot resume a model that was loaded with
  `distributed_config`. Test: test_native.py.
- `Trainer._load_from_checkpoint` and `Trainer._load_best_model`. By: `keep_adapters_in_place`. Reason: PEFT puts other
  parameters in the place of adapters in bfloat16 that it loads. Test: test_adapters_in_place.py. `loads_itself` reads
  the first: nothing public tells whether a Trainer loads weights in a way of its own. Test: test_resumable.py.
- `Trainer.create_optimizer` (public). By: `wrap_method`. Reason: there is no event between the making of
  the optimizer and of its scheduler. Test: test_lr_scaling_callback.py.
- `Trainer.save_model` (public), `Trainer._save_optimizer_and_scheduler`, `Trainer._save_scaler` and
  `Trainer._save_rng_state`, during a save. By: `methods_skipped`. Reason: a subclass's own `_save_checkpoint` must
  run, and Trainer's part of it is written in the background. Test: test_checkpoint_writer.py.
- `Trainer.push_to_hub` (public) and `Trainer._push_from_checkpoint`, as long as `train`; while they run,
  `upload_folder` of the client that transformers shares. By: hub.py, `pushes_delayed`. Reason: Trainer uploads its
  output directory with fixed patterns, and a checkpoint before it has its final name. Test: test_hub.py.
- `Trainer.evaluate` (public). By: `wrap_evaluate`. Reason: no flag of `TrainerControl` ends an evaluation, and no
  event comes before one. Test: test_preemption.py.
- `Trainer.compute_loss` (public). By: `wrap_method`. Reason: FLOPs are counted from here on, without the
  generation that TRL's trainers do before; there is no event between the two. Test: test_flops.py.
- `Trainer.training_step` (public), in a training with `TraceCallback`. By: `wrap_training_step`. Reason: no event
  comes right before and right after a micro-batch. Test: test_trace_callback.py.
- `Trainer.prediction_step` (public), as long as the Trainer lives. By: `wrap_prediction_steps`. Reason: an evaluation
  says nowhere else whether it needs logits. Test: test_fused_loss.py.
- `Trainer.get_eval_dataloader` (public), as long as `train`. By: `on_eval_dataloader`. Reason: no argument sets the
  start method of data loader workers. Test: test_preemption.py.
- `Trainer.set_initial_training_values` and `Trainer.log` (public). By: `finish_without_steps`. Reason: Trainer takes
  a step even if the checkpoint has all of them. Test: test_resume.py.
- `Trainer._init_training_state`, `Trainer._run_epoch`, `Trainer.get_batch_samples` (public) and
  `Trainer._finalize_training`, in a training whose global batch changes. By: `wrap_method`, for accumulation.py.
  Reason: the loop takes one accumulation for all steps, and no event comes before a step's batches are fetched. It
  reads `args.gradient_accumulation_steps` for each micro-batch, and asks for a remainder. Test: test_growing_batch.py.
- `Trainer.set_initial_training_values` and `Trainer.create_scheduler` (public). By: `wrap_counting`,
  `wrap_method`. Reason: how many steps a training has is computed from one accumulation, and a learning rate
  schedule counts steps. Test: test_growing_batch.py.
- `Trainer._get_grad_norm`, and `step` of Accelerate's optimizer (public). By: update_gate.py, `wrap_method`,
  `wrap_optimizer_step`. Reason: no event has the norm of the gradients before the optimizer steps, or keeps it from
  stepping. Test: test_bad_batches.py.
- `Trainer.train_dataset` and single training arguments (public). By: `replace_train_dataset`, `set_argument`.
  Reason: the stream that keeps its position is needed during the training only. Test: test_stream_position.py.
- `Accelerator.prepare` (public). By: fsdp2_loading.py, fsdp2_buffers.py. Reason: Accelerate's FSDP2 cannot load
  persistent buffers, and gathers no head whose final norm it does not find. Test: test_fsdp2_loading.py.
- `get_output_embeddings` (public) of a model, while Accelerate prepares it. By: `gather_head_with_root`. Reason:
  nothing else tells Accelerate to leave the head with the rest of the model. Test: test_fsdp2_loading.py.
- `Trainer.data_collator` (public), as long as the Trainer lives. By: `wrap_data_collator`. Reason: what the ranks
  need in a batch is known when the Trainer is there. Test: test_vision_recipe.py.
- `Accelerator.deepspeed_ulysses_dl_adapter` (public). By: `wrap_ulysses_loader`. Reason:
  `accelerate.skip_first_batches` cannot skip in the loader that it returns. Test: test_integrations.py,
  TestUlyssesLoader.
- `Module._parameters` of the experts of a layer, while they compute, and `forward` (public) of PEFT's `ParamWrapper`,
  as long as the model lives. By: expert_adapters.py. Reason: PEFT cannot adapt experts of which a rank has a part and
  keeps merged copies of others, and an assignment to the attribute refuses a tensor that is not a parameter. Test:
  test_native.py, TestAdapters, and test_expert_adapters.py.
- a state dict post hook of the model (public), as long as it lives. By: weight_wrappers.py. Reason: Trainer cannot
  save the weights that torchao wraps for FP8. Test: test_weight_wrappers.py.

- `__class__` of the batch sampler of the training data (public). By: `listen_to_batches`. Reason: nothing tells which
  samples a batch consists of, or when a pass begins. Test: test_data_order.py.

Read, called, or set once

- the local variables `self`, `resume_from_checkpoint` and `trial` of Trainer's frames, and the code object of
  `Trainer.train`. By: `calling_trainer`, `resumed_from`, `training_frame`, `run_dir`. Reason: a callback does not
  get its Trainer, nor, where it joins a running training, the checkpoint; a signal handler gets a frame only. Test:
  test_integrations.py,
  test_the_trainer_and_its_checkpoint_are_found_on_the_stack.
- the local variables of the constructors of TRL's trainers, and `vllm_*` and `teacher_*` of their arguments (public).
  By: `constructor_arguments`, generation_server.py. Reason: they ask a server of vLLM on rank 0 alone, after the last
  event of the construction, and what is asked depends on what the constructor was given. Test:
  test_generation_server.py.
- `Trainer._globalstep_last_logged`, set. By: `jump_to`. Reason: Trainer divides the logged loss by the steps since
  the last log, and an island that returns has not taken those of the others. Test: test_islands.py.
- `Trainer._initial_global_step`, read. By: accumulation.py. Reason: Trainer reports samples per second by the share of
  the steps that a launch has taken, which is not that of the samples. Test: test_growing_batch.py.
- `Trainer._globalstep_last_logged`, `Trainer._total_loss_scalar` and `Trainer._tr_loss`, set. By:
  `leave_out_of_logged_loss`, `leave_out_of_final_loss`. Reason: Trainer divides by all steps, and a step that is left
  out has no loss. Test: test_bad_batches.py.
- `Trainer._tr_loss`, `Trainer._globalstep_last_logged` and `Trainer._total_loss_scalar`, read and set. By:
  `running_loss`, `set_running_loss`. Reason: the first log after a resume would be the mean of the steps since the
  resume only. Test: test_running_loss.py.
- `AcceleratedOptimizer._is_overflow`, set. By: update_gate.py. Reason: the schedule and averages of weights ask
  Accelerate whether a step was skipped, and only its gradient scaler says so. Test: test_bad_batches.py.
- `_update_scale`, replaced, and `averaged_gradients` of DeepSpeed's optimizers. By: `Zero.ask_engine`. Reason: the
  engine steps in one call, and has no event before the update. Test: test_bad_batches.py.
- `DeepSpeedEngine.set_train_batch_size` (public). By: `set_accumulation`. Reason: the engine counts samples by its own
  accumulation. Test: test_growing_batch.py.
- `DeepSpeedEngine.gradient_clipping` (public). By: strategies/zero.py. Reason: DeepSpeed clips at a norm of its own
  where its config has none. Test: test_deepspeed_settings.py.
- `_no_split_modules` of a model, set. By: `name_layers_that_are_there`. Reason: Accelerate fails under FSDP at a layer
  that is named there and missing. Test: test_fsdp2_loading.py.
- `Trainer._load_rng_state`. By: `load_rng_state`. Reason: Trainer calls it before it is known where a stream
  continues. Test: test_stream_position.py.
- `Trainer._train_batch_size`, set before transformers 5.4 if it is read in `on_init_end`. By: `global_batch_size`,
  and read by `micro_batch_size`. Reason: Trainer sets it later. Test: test_lr_scaling_callback.py, in
  `make test-versions`.
- `PartialState.distributed_type` of Accelerate (public), set. By: `let_fsdp_run_on_cpu`. Reason: Accelerate runs FSDP
  on accelerators only. Test: test_strategies.py.
- `_compiled_call_impl` of a module. By: `is_compiled`. Reason: torch has no public way to tell a module that is
  compiled in place. Test: test_tokens.py.
- `_hp_mapping` and `_dp_group` of a parameter under ZeRO stages 1 and 2. By: strategies/zero.py. Reason: DeepSpeed's
  public functions send the fp32 copy of a parameter to all ranks, and none returns a rank's own part. Test:
  test_averaging_strategies.py.
- `PreTrainedConfig._attn_implementation`. By: `attention_implementation`. Reason: only its setter is public. Test:
  test_parallel_context.py.
"""
