# make train   set up .venv and run the main job        make check        ruff, mypy
# make test    the test suite                           make test-faults  the long fault suite
# make docs    the documentation site -> site/          make test-gpu     what needs a CUDA GPU
# make bench   paired measurements -> benchmarks/ make test-trainers  the Trainer matrix
# make test-versions  other versions of torch and transformers        make test-finetuning  chat data and TRL recipes

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
GPUS = $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count())")
PROCESSES ?= $(if $(filter 0,$(GPUS)),2,$(GPUS))
OUTPUT_DIR ?= runs/train
# No target contacts a hub, an account or a cloud; W&B writes its files into the output directory.
OFFLINE := HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true HFSCALE_CLOUD=none
# Modules are compiled to bytecode when they are first imported: compiling all of torch takes longer.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: train test check docs test-trainers test-finetuning test-versions test-faults test-gpu bench clean
.DEFAULT_GOAL := train

train: $(VENV)/installed
	@mkdir -p $(OUTPUT_DIR)
	$(OFFLINE) WANDB_DIR=$(OUTPUT_DIR) $(BIN)/accelerate launch --config_file accelerate_configs/ddp.yaml \
	  --num_processes $(PROCESSES) recipes/ddp/train.py --output_dir $(OUTPUT_DIR) --report_to wandb $(ARGS)

test: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not (gpu or faults or timing or trainers or finetuning)" $(ARGS)
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "timing and not gpu" $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

test-trainers: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m trainers tests/trainers $(ARGS)

test-finetuning: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m finetuning tests/finetuning $(ARGS)

test-faults: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 HFSCALE_TEST_LAUNCH=agent $(BIN)/python -m pytest -q -m faults $(ARGS)

test-versions: $(VENV)/installed-dev
	$(OFFLINE) $(BIN)/python tests/versions $(ARGS)

test-gpu: $(VENV)/installed-dev
	$(OFFLINE) $(BIN)/python -m pytest -q -m gpu $(ARGS)

bench: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .venv-versions runs dist build site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# DeepSpeed, which the tests need, is built from source and looks for torch: torch is there before it.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with the pinned versions: a minute or two …"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) -e ".[recipes,wandb]"
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Adding what the tests need …"
	$(PIP) setuptools wheel
	$(PIP) -e ".[dev]"
	@rm -rf $(VENV)/torch_extensions
	$(BIN)/python tests/build_extensions.py
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@echo "Adding what the documentation needs …"
	$(PIP) -e ".[docs]"
	@touch $@
