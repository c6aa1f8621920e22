# The front door. Each target is a few lines; what needs thought is a script in tools/.

.DEFAULT_GOAL := help
.PHONY: help demo test lint fmt roleserver sqlx-data e2e e2e-ssh

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: ## watch a simulated fleet become healthy (ARGS='--machines 50 --faults mild --until-ready')
	@tools/demo $(ARGS)

test: ## run every test; SHEPHERD_TEST_MODE=skip-locked|waiting|serializable for one database mode only
	@tools/test

lint: ## format, lints, features alone, recorded statements, dependencies, licences, scripts
	@tools/lint

fmt: ## format the code
	cargo fmt

roleserver: ## build the static program for machines
	@tools/roleserver

sqlx-data: ## record what the database says about every statement into .sqlx
	@tools/sqlx-data

e2e: e2e-ssh ## run every end-to-end test

e2e-ssh: roleserver ## take over real OpenSSH servers with the static role server
	tests/e2e_ssh/run
