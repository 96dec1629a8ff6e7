# `make` lists the commands. Everything here is a short name for a command that also works without make.
SHELL := /bin/sh
PYTHON := .venv/bin/python3
PATH := $(CURDIR)/.venv/bin:$(PATH)
export PATH
SCENARIO ?= all
SEEDS ?= 50
HOSTS ?= 1
.DEFAULT_GOAL := help

.PHONY: help venv venv-test demo demo-down test lint unit lab-test molecule faults bench lab-up lab-down plan apply status bump docs bundle

help: ## List the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## Virtual environment for operating (ansible-core, ansible-runner)
	@tools/venv.sh .venv operator

venv-test:
	@tools/venv.sh .venv test

plan: venv ## Preview on this Spark, or INVENTORY=..., or HOST=me@spark.local (changes nothing)
	@tools/apply.sh plan

apply: venv ## Provision this Spark, or INVENTORY=..., or HOST=me@spark.local; ADOPT=1 takes over a running server; ASK=1 asks for the sudo password; DETACH=1 goes on by itself
	@tools/apply.sh apply

status: venv ## Wanted against running, per host
	@tools/apply.sh status

bump: venv ## Move the pin: TAG=v0.6.6
	@$(PYTHON) tools/bump.py "$(TAG)"

bundle: venv ## Pack what hosts without Internet need: DIR=dist/bundle, WEIGHTS=1, PACKAGES=1, VARS=file.yml
	@$(PYTHON) tools/bundle.py "$(or $(DIR),dist/bundle)" $(if $(WEIGHTS),--weights) $(if $(PACKAGES),--packages) $(if $(VARS),--vars "$(VARS)")

demo: venv-test ## One simulated Spark on this machine, provisioned over SSH and asked for the capital of France (root)
	@$(PYTHON) tools/demo.py

demo-down: ## Take the demo down
	@$(PYTHON) -m lab down --name demo

lab-up: venv-test ## HOSTS=n simulated Sparks to play with (root)
	@$(PYTHON) -m lab needs --install && $(PYTHON) -m lab up $(HOSTS) --name lab

lab-down: ## Take them down
	@$(PYTHON) -m lab down --name lab

test: venv-test ## Everything a change must pass: lint, unit tests, simulated Sparks (root; up to 25 minutes)
	@$(PYTHON) tools/check.py test

lint: venv-test ## yamllint, ruff, mypy, ansible-lint, drift of generated pages
	@$(PYTHON) tools/check.py lint

unit: venv-test ## Pure tests, no root
	@$(PYTHON) tools/check.py unit

lab-test: venv-test ## pytest against simulated Sparks (root)
	@$(PYTHON) tools/check.py lab

molecule: venv-test ## Every molecule scenario, or SCENARIO=name (root)
	@$(PYTHON) tools/check.py molecule $(SCENARIO)

faults: venv-test ## Every random test with many seeds: SEEDS=50 (root; long)
	@FAULT_SEEDS=$(SEEDS) $(PYTHON) tools/check.py faults

bench: venv-test ## Figures, as ratios within one run (root)
	@$(PYTHON) tools/check.py bench

docs: venv-test ## Write the generated pages again
	@$(PYTHON) tools/check.py docs
