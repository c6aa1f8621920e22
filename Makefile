# The front door. Each target is a few lines; what needs thought is a script in tools/.

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint fmt fire faults fuzz bench bench-compare programs roleserver kube-apiserver kube-programs kube-bundle sqlx-data readme e2e e2e-ssh e2e-api e2e-cluster e2e-kubernetes e2e-kube-bundle e2e-hardware-report

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: ## watch a simulated fleet become healthy (ARGS='--machines 50 --faults mild --until-ready')
	@tools/demo $(ARGS)

test: ## run every test, and those that can differ in both database dialects (SHEPHERD_TEST_DIALECT=cockroachdb for all in one)
	@tools/test

check: ## before each commit: format, lints, unit tests of the modules that changed (SINCE=HEAD)
	@tools/check $(SINCE)

test-all: ## run every test in both database dialects
	@tools/test --all

fuzz: ## odd bytes for every decoder that faces outside (FUZZ_SECONDS=60 each, FUZZ_DECODER=name for one)
	@tools/fuzz

lint: ## format, lints, features alone, recorded statements, dependencies, licences, scripts
	@tools/lint

fmt: ## format the code
	cargo fmt

bench: ## measure the engine on a private PostgreSQL and write BENCHMARKS.md (ARGS='--quick', '--full', '--memory', '--part held' or '--part watchers')
	@tools/bench $(ARGS)

bench-compare: ## measure graphile-worker and pg-boss beside it, which npm installs (ARGS='--quick')
	@tools/bench --compare $(ARGS)

programs: ## build shepherd and shepherdctl to install, with their debug files, into target/programs
	@tools/programs

roleserver: ## build the static program for machines, below 20 MB
	@tools/roleserver

kube-apiserver: ## build the kube-apiserver and etcd that tests use, once, into the user's cache folder (minutes, needs Go 1.26)
	@tools/kubernetes

kube-programs: ## build all Kubernetes 1.20.2 programs of a bundle from Debian's source package (minutes)
	@tools/debian-kubernetes all

kube-bundle: ## everything that a node runs of Kubernetes, in one file named by its digest (ARGS='--controllers-only')
	@tools/kube-bundle $(ARGS)

sqlx-data: ## record what the database says about every statement into .sqlx
	@tools/sqlx-data

readme: ## follow the README to the letter on a fresh clone (ARGS='--dialect postgres --only "make demo"')
	@tools/readme-check $(ARGS)

fire: ## throw at it what its first years will, in the long form
	@tools/fire

faults: ## break the engine on purpose, and see each fault turn its test red (ARGS='NAME' for one)
	@tools/faults $(ARGS)

e2e: e2e-ssh e2e-api e2e-cluster e2e-hardware-report ## run every end-to-end test

e2e-ssh: roleserver ## take over real OpenSSH servers with the static role server
	tests/e2e_ssh/run

e2e-api: ## call the API as its OpenAPI document says, and as it does not (schemathesis, which pip installs)
	tests/e2e_api/run

e2e-cluster: ## a cluster of machines in namespaces, with release programs and a real etcd, broken in every way (E2E_IDLE_SECONDS=600)
	tests/e2e_cluster/run

e2e-hardware-report: roleserver ## machines whose hardware is known, Debian with systemd, and an empty root (QEMU)
	tests/e2e_hardware_report/run
	tests/e2e_hardware_report/takeover

e2e-kubernetes: ## a cluster of four machines in namespaces with real API servers, broken, rotated, upgraded and taken back (builds Kubernetes first)
	tests/e2e_kubernetes/run

e2e-kube-bundle: ## everything in a bundle of Kubernetes runs, to the point where a pod answers (builds Kubernetes first)
	tests/e2e_kube_bundle/run
