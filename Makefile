# Every target first installs what it needs, so that `make train` works in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
RUN ?=
ARGS ?=
ONLY ?=
WORKERS ?= 2
# A file's tests share fixtures, so one worker runs them all; files with long tests come first.
# A test that ended its worker is tried once more: then it is its fault.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1
SHELL := /bin/bash
# Tests start hundreds of processes, which would compile the program again each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

# The stamp is written last, so that an interrupted install is completed by the next call.
# Nothing is compiled: Python compiles what it imports, a part of 21,000 files.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m tools.gpu_packages
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt $$($(BIN)/python -m tools.gpu_packages index) torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable ".[dev$$($(BIN)/python -m tools.gpu_packages extra)]"
	@touch $@

install: $(STAMP)  ## .venv with the pinned dependencies, and those of a GPU if there is one

train: $(STAMP)  ## fine-tune the shipped tiny base; ARGS="+experiment=llama8b" for another run
	$(BIN)/python -m app.train $(ARGS)

train-dpo: $(STAMP)  ## train the shipped tiny base on pairs of answers: `+experiment=dpo_quickstart`
	$(BIN)/python -m app.train +experiment=dpo_quickstart $(ARGS)

preview: $(STAMP)  ## what a run would be trained on: rows, loss mask, packs, audit
	$(BIN)/python -m app.preview $(ARGS)

plan: $(STAMP)  ## will it fit, how fast, what to change; ARGS="+experiment=llama70b hardware=8xa100_80gb"
	$(BIN)/python -m app.plan $(if $(ARGS),$(ARGS),+experiment=llama8b hardware=h100)

# The run to evaluate: the one given, or the newest; the default run is trained if there is none.
A_RUN = @$(if $(RUN)$(findstring run=,$(ARGS))$(findstring model.path=,$(ARGS)),true,$(BIN)/python -c \
	"import sys; from app.run.find import finished_runs; sys.exit(not finished_runs())" \
	|| $(BIN)/python -m app.train)
EVALUATE = $(BIN)/python -m app.evaluate $(if $(RUN),run=$(RUN))

eval: $(STAMP)  ## base vs tuned of RUN=FOLDER, or of the newest run; trains the default first
	$(A_RUN)
	$(EVALUATE) $(ARGS)

eval-compare: $(STAMP)  ## the same as a gate: exit code 4 if tuned is worse; MAX_REGRESSION=0.02 DATA=FILE
	$(A_RUN)
	$(EVALUATE) evaluation.max_regression=$(or $(MAX_REGRESSION),0) $(if $(DATA),'data.datasets=[{path: $(DATA)}]' \
		data.test_datasets=[] data.val_set_size=0.99 evaluation.exact_match=true) $(ARGS)

eval-mmlu: $(STAMP)  ## MMLU by subject, base vs tuned; DATA=FOLDER with the published files, else sample rows
	$(A_RUN)
	$(EVALUATE) evaluation=mmlu $(if $(DATA),evaluation.task_dir=$(DATA)) $(ARGS)

eval-gsm8k: $(STAMP)  ## GSM8K, base vs tuned; DATA=FOLDER with the published file, else sample rows
	$(A_RUN)
	$(EVALUATE) evaluation=gsm8k $(if $(DATA),evaluation.task_dir=$(DATA)) $(ARGS)

eval-harness: $(STAMP)  ## lm-evaluation-harness: TASKS=arc_easy,boolq; DATA=FOLDER of its task files; else a sample task
	@$(BIN)/python -c "import lm_eval" 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --constraint constraints.txt --editable ".[harness]"
	$(A_RUN)
	$(EVALUATE) $(if $(TASKS)$(DATA),'evaluation.harness=[$(TASKS)]' $(if $(DATA),evaluation.harness_dir=$(DATA)), \
		evaluation.harness=[loft_sample] evaluation.harness_dir=app/evaluation/tasks/samples/harness \
		evaluation.allow_code=true) $(ARGS)

eval-mt-bench: $(STAMP)  ## answers graded by an LLM: JUDGE_URL=https://HOST/v1 JUDGE=NAME DATA=FOLDER; without them by a rule
	$(A_RUN)
	$(if $(JUDGE_URL),,$(BIN)/python -m tools.sample_judge )$(EVALUATE) evaluation=mt_bench \
		$(if $(DATA),evaluation.judge.questions=$(DATA)) \
		$(if $(JUDGE_URL),evaluation.judge.url=$(JUDGE_URL) evaluation.judge.model=$(JUDGE)) $(ARGS)

merge: $(STAMP)  ## merge the adapter of RUN=FOLDER, or of the newest run, into a Hugging Face folder
	$(BIN)/python -m app.merge $(if $(RUN),run=$(RUN)) $(ARGS)

chat: $(STAMP)  ## chat with RUN=FOLDER, or the newest run, in the terminal
	$(BIN)/python -m app.chat $(if $(RUN),run=$(RUN)) $(ARGS)

serve: $(STAMP)  ## OpenAI-compatible API and chat page at 127.0.0.1:8000, for RUN=FOLDER or the newest run
	$(BIN)/python -m app.serve $(if $(RUN),run=$(RUN)) $(ARGS)

sweep: $(STAMP)  ## a small grid of runs, each in its own process, and a table by val/loss
	$(BIN)/python -m app.train -m \
		$(if $(ARGS),$(ARGS),+experiment=quickstart adapter.r=4$(comma)8 trainer.max_steps=20)
comma := ,

sweep-lr: $(STAMP)  ## find a learning rate in short runs: `+sweep=find_lr`; ARGS="+experiment=..."
	$(BIN)/python -m app.train -m $(if $(ARGS),$(ARGS),+experiment=quickstart) +sweep=find_lr

doctor: $(STAMP)  ## check this machine: versions, GPUs, links, memory, disks; exit code 3 if a run would stop
	$(BIN)/python -m app.doctor $(ARGS)

RANKS ?= $(if $(GPUS),$(words $(GPUS)),2)
GPUS = $(wildcard /dev/nvidia[0-9] /dev/nvidia[0-9][0-9])
bandwidth: $(STAMP)  ## bandwidth between RANKS=2 ranks of this machine (or one per GPU); ARGS="+experiment=llama8b strategy=fsdp"
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) -m app.doctor $(ARGS)

BUILDER = $(firstword $(foreach name,docker podman buildah,$(if $(shell command -v $(name)),$(name))))
TARGET ?= gpu
IMAGE ?= loft:$(TARGET)
image:  ## an image of this checkout for launch.image=, by docker, podman or buildah; TARGET=cpu without CUDA
	@test -n "$(BUILDER)" || { echo "error: install docker, podman or buildah first" >&2; exit 3; }
	$(BUILDER) build --target $(TARGET) --tag $(IMAGE) --file Dockerfile \
		--build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
		--build-arg COMMIT=$$(git rev-parse --short HEAD) .
	@$(BUILDER) image inspect $(IMAGE) --format '$(IMAGE): {{.Size}} bytes' 2>/dev/null || true

tiny-base: $(STAMP)  ## rebuild the shipped base: train from random weights, probe, install
	$(BIN)/python -m tools.tiny_base.write
	$(BIN)/python -m app.train +experiment=tiny_base output.dir=outputs/tiny_base/newest
	$(BIN)/python -m tools.tiny_base.install outputs/tiny_base/newest

check: $(STAMP)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

test: $(STAMP)  ## the fast tests, in minutes; WORKERS=2 processes of one thread each
	$(PYTEST) -m "not slow" $(ARGS)

# A third of their time is spent waiting: for lost hosts, cut links, runs that stop.
test-slow: WORKERS = 4
test-slow: $(STAMP)  ## the slow tests: matrices of strategies, kills, whole runs
	$(PYTEST) -m "slow and not versions" $(ARGS)

test-versions: $(STAMP)  ## sweeps over model families and simulated GPUs; needed after a change of what tools/tested_versions.py lists
	$(PYTEST) -m versions
	$(BIN)/python -m tools.tested_versions record

# One call, in which the slow tests' waits are filled by the fast ones, and all is imported once a worker.
test-both: WORKERS = 4
test-both: $(STAMP)  ## the fast and the slow tests, as `.ci/run` runs them
	$(PYTEST) -m "not versions" $(ARGS)

test-all: test-both test-versions  ## every test that this machine can run

test-strategies: $(STAMP)  ## the same run under every strategy gives the same numbers (test-all runs a part of it)
	$(PYTEST) -m "slow or strategies" tests/parity/strategies $(ARGS)

FLOOR ?= 5.3.0
FLOOR_DIR = outputs/cache/transformers-$(FLOOR)
FLOOR_FAMILIES = bart falcon_h1 gemma2 gemma3 gpt_oss jamba llama llama4_text mamba2 mixtral nemotron_h qwen3 \
	qwen3_5_text qwen3_next t5 umt5
test-floor: $(STAMP)  ## families on the oldest transformers: equal, or refused; FLOOR=5.17.0 ARGS="llama t5"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(FLOOR_DIR) \
		--constraint <(grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt) transformers==$(FLOOR)
	PYTHONPATH=$(FLOOR_DIR) $(BIN)/python -m tests.parity.every_family $(or $(ARGS),$(FLOOR_FAMILIES))

chaos: $(STAMP)  ## kill runs, fill their disks, resume them: bit for bit the same? SEED=N; FULL=1 for all
	$(BIN)/python -m tests.reliability $(if $(SEED),seed=$(SEED)) $(if $(FULL),full)

seeded-bugs: $(STAMP)  ## inject bugs one at a time, each must make its test fail; ARGS="word of a name"
	$(BIN)/python -m tests.reliability.seeded_bugs $(ARGS)

bench: $(STAMP)  ## benchmarks: a table and a JSON line per figure; ONLY=startup|loop|packing|prepare|loss|checkpoint|strategies|hybrids|gpu_ops|plan|evaluate
	$(BIN)/python -m benchmarks $(ONLY)

bench-peers: $(STAMP)  ## training speed and memory compared with peers; ONLY="lora_fp32|lora_bf16|full|dpo with=all"
	$(BIN)/python -m benchmarks.training $(ONLY)

bench-gpu: $(STAMP)  ## an 8B model on one GPU, in eight minutes: speed, memory, time by part
	$(BIN)/python -m benchmarks.gpu

settings: $(STAMP)  ## write docs/settings.md from the settings' fields
	$(BIN)/python -m tools.settings docs

schema: $(STAMP)  ## write conf/experiment/schema.json, by which editors complete experiments
	$(BIN)/python -m tools.settings schema

clean:  ## remove caches; runs under outputs/ are kept
	rm -rf outputs/cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info

.PHONY: help install train train-dpo preview plan eval eval-compare eval-mmlu eval-gsm8k eval-harness eval-mt-bench merge chat serve sweep sweep-lr doctor bandwidth tiny-base check test test-slow test-versions test-both test-all test-strategies test-floor chaos seeded-bugs bench bench-peers bench-gpu settings schema clean
