# make train            set up .venv and train a small Llama
# make check            ruff, mypy, and what tests/sizes.py says of long and dense files
# make docs             the documentation site -> site/
# make test             the test suite; ARGS=tests/checkpoint limits it to one folder or file
# make test-long        comparisons of layouts and strategies that take long, and many crash points
# make test-trainers    the Trainers of transformers, TRL and sentence-transformers
# make test-recipes     recipes and scripts under every strategy, launched as users do
# make test-finetuning  chat data and the TRL recipes
# make test-versions    other versions of torch, transformers and Python
# make test-faults      the long fault-injection suite; FAULTS=1000 SEED=1 FUZZ=10000 for more random faults and hostile files
# make test-mutations   breaks the package line by line: do the tests notice? ARGS=recovery limits it to one package
# make test-differential  programs as users write them: hfscale against plain Trainer; PROGRAMS=5000, SEED=1
# make test-gpu         what needs a CUDA GPU; with GPU_PYTHON=python3, which installs nothing, that interpreter runs it
# make gpu-day          measures hfscale on the GPUs of this machine, and prints a table; ARGS=--list names the parts
# make gpu-wheels       collects the packages for it that an image without network lacks -> gpu-wheels/
# make bench            paired measurements -> benchmarks/
# make clean            remove .venv and everything that was built

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
GPUS = $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count())")
PROCESSES ?= $(if $(filter 0,$(GPUS)),2,$(GPUS))
OUTPUT_DIR ?= runs/train
# No target contacts a hub, an account or a cloud; W&B writes its files into the output directory.
OFFLINE := HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true HFSCALE_CLOUD=none
# Modules are compiled to bytecode when they are first imported: compiling all of torch takes longer. Some images forbid
# Python to keep it, and then every process that imports torch and transformers begins with 15 s of compiling.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PYTEST := $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=15
TIMED = $(shell grep -rl --include='test_*.py' 'mark\.timing' tests)
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: train test check docs test-long test-recipes test-trainers test-finetuning test-versions test-faults test-mutations test-differential test-gpu gpu-day gpu-wheels bench clean
.DEFAULT_GOAL := train

train: $(VENV)/installed
	@mkdir -p $(OUTPUT_DIR)
	$(OFFLINE) WANDB_DIR=$(OUTPUT_DIR) $(BIN)/accelerate launch --config_file accelerate_configs/ddp.yaml \
	  --num_processes $(PROCESSES) recipes/ddp/train.py --output_dir $(OUTPUT_DIR) --report_to wandb $(ARGS)

# Folders and files in ARGS limit what is collected. Few files have a test that compares wall-clock times: the second
# command imports those only, and may select none of ARGS, which is pytest's exit code 5.
test: $(VENV)/installed-dev
	$(PYTEST) $(PARALLEL) -m "not (gpu or faults or timing or long or trainers or finetuning or recipes)" $(ARGS)
	$(PYTEST) -m "timing and not (gpu or faults or long)" $(or $(ARGS),$(TIMED)) || [ $$? -eq 5 ]

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/sizes.py

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

test-long: $(VENV)/installed-dev
	$(PYTEST) $(PARALLEL) -m "long and not (gpu or faults)" $(ARGS)

test-recipes: $(VENV)/installed-dev
	$(PYTEST) $(PARALLEL) -m recipes $(ARGS)

test-trainers: $(VENV)/installed-dev
	$(PYTEST) $(PARALLEL) -m trainers $(or $(ARGS),tests/trainers)

test-finetuning: $(VENV)/installed-dev
	$(PYTEST) $(PARALLEL) -m finetuning $(or $(ARGS),tests/finetuning)

test-faults: $(VENV)/installed-dev
	HFSCALE_TEST_LAUNCH=agent $(PYTEST) -m faults $(ARGS)

test-versions: $(VENV)/installed-dev
	$(OFFLINE) $(BIN)/python tests/versions $(ARGS)

test-mutations: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python tests/mutations $(ARGS)

test-differential: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python tests/differential --programs $(or $(PROGRAMS),200) --seed $(or $(SEED),0) $(ARGS)

# Images for GPUs bring packages of their own: what needs a package that is missing is skipped, and the reason names it.
test-gpu: $(if $(GPU_PYTHON),,$(VENV)/installed-dev)
	$(OFFLINE) $(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q --durations=15 -m gpu $(ARGS)

# It installs nothing but the wheels of gpu-wheels/, into a folder of its own, if there are any.
gpu-day:
	$(OFFLINE) $(or $(GPU_PYTHON),python3) -m benchmarks.gpu $(ARGS)

gpu-wheels: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.gpu.wheels $(ARGS)

bench: $(VENV)/installed-dev
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .venv-versions gpu-wheels runs dist build site .pytest_cache .mypy_cache .ruff_cache
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
