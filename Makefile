# Entry points of the project. Each target is a few lines; everything longer is a script in tools/.

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint fmt fire faults fuzz bench bench-compare programs roleserver kube-apiserver kube-programs kube-bundle sqlx-data seccomp-profile readme e2e e2e-ssh e2e-api e2e-database e2e-cluster e2e-kubernetes e2e-kube-bundle e2e-authority e2e-authority-theft e2e-authority-upgrade e2e-attack e2e-hardware-report e2e-systemd e2e-systemd-qemu e2e-systemd-nspawn

help: ## list all targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: ## run a simulated fleet until it is healthy (ARGS='--machines 50 --faults mild --until-ready')
	@tools/demo $(ARGS)

test: ## run every test on PostgreSQL, and in both database dialects those that can differ (SHEPHERD_TEST_DIALECT=cockroachdb: all in that one)
	@tools/test

check: ## check before a commit: format, lints, unit tests of the changed modules, integration tests of the changed crates (SINCE=HEAD)
	@tools/check $(SINCE)

test-all: ## run every test in both database dialects
	@tools/test --all

fuzz: ## fuzz every decoder of external input (FUZZ_SECONDS=60 each, FUZZ_DECODER=name for one)
	@tools/fuzz

lint: ## check format, lints, each feature alone, recorded statements, dependencies, licences, scripts
	@tools/lint

fmt: ## format the code
	cargo fmt --all

bench: ## benchmark the engine on a private PostgreSQL and write BENCHMARKS.md (ARGS='--quick', '--full', '--memory', '--part flood', '--part held', '--part images', '--part lists' or '--part watchers')
	@tools/bench $(ARGS)

bench-compare: ## benchmark the engine beside graphile-worker and pg-boss, which npm installs (ARGS='--quick')
	@tools/bench --compare $(ARGS)

programs: ## build shepherd and shepherdctl for installation, with their debug files, into target/programs
	@tools/programs

roleserver: ## build the static role server for machines, below 20 MB
	@tools/roleserver

kube-apiserver: ## build the kube-apiserver, etcd and etcdutl that tests use, once, into the user's cache folder (minutes, needs Go 1.26)
	@tools/kubernetes

kube-programs: ## build all Kubernetes 1.20.2 programs of a bundle from Debian's source package (minutes)
	@tools/debian-kubernetes all

kube-bundle: ## build a bundle: one file, named by its digest, with everything that a Kubernetes node runs (ARGS='--controllers-only')
	@tools/kube-bundle $(ARGS)

sqlx-data: ## record the description of every SQL statement from the database into .sqlx
	@tools/sqlx-data

seccomp-profile: ## compare the seccomp profile of containerd's release with the filter of the role server (downloads the release with Go; ARGS='FILE' for a copy of the file)
	@tools/seccomp-profile $(ARGS)

readme: ## verify every command in the README on a fresh clone (ARGS='--dialect postgres --only "make demo"')
	@tools/readme-check $(ARGS)

fire: ## run the long fault-injection suite
	@tools/fire

faults: ## plant each known fault in a copy of the tree and check that its test fails (ARGS='NAME' for one)
	@tools/faults $(ARGS)

e2e: e2e-ssh e2e-api e2e-database e2e-cluster e2e-hardware-report e2e-systemd-qemu ## run the end-to-end tests that need no Kubernetes programs

e2e-ssh: roleserver ## take over real OpenSSH servers with the static role server
	tests/e2e_ssh/run

e2e-api: ## fuzz the API with valid and invalid requests from its OpenAPI document (schemathesis, which pip installs)
	tests/e2e_api/run

e2e-database: ## let the database of a shepherd fail (address that moves, several hosts, PgBouncer, full disk, Patroni with and without HAProxy; E2E_PARTS=patroni), and run the tests of bmdb on PostgreSQL 18
	tests/e2e_database/run
	tests/e2e_database/postgres18

e2e-cluster: ## create a cluster of machines in namespaces, with release programs and a real etcd, and inject failures (E2E_IDLE_SECONDS=600)
	tests/e2e_cluster/run

e2e-hardware-report: roleserver ## check the hardware report in QEMU, take over Debian with systemd, and run the role server in an otherwise empty root directory
	tests/e2e_hardware_report/run
	tests/e2e_hardware_report/takeover

e2e-systemd: e2e-systemd-qemu e2e-systemd-nspawn ## check that what a node runs survives its role server, on machines with systemd and control groups of either version (builds Kubernetes first)

e2e-systemd-qemu: ## boot Debian 12 with cgroup v2 alone in QEMU, check what systemd does to the children of a unit, and that what a node runs survives its role server
	tests/e2e_systemd/run
	tests/e2e_systemd/cluster

e2e-systemd-nspawn: ## the same in containers of systemd-nspawn, with the control groups of this host and a pod of a real kubelet (builds Kubernetes first)
	tests/e2e_systemd/nspawn --plain
	tests/e2e_systemd/nspawn

e2e-kubernetes: ## create a cluster of four machines in namespaces with real API servers, inject failures, rotate its keys, upgrade it and roll it back (builds Kubernetes first)
	tests/e2e_kubernetes/run

e2e-kube-bundle: ## run everything in a bundle of Kubernetes until a pod answers (builds Kubernetes first)
	tests/e2e_kube_bundle/run

e2e-authority: ## replace the authority of a cluster under requests, kill everything at each stage, but not after a theft, which is e2e-authority-theft: hours (E2E_PARTS=killed for one part; builds Kubernetes first unless E2E_KUBERNETES=no)
	tests/e2e_authority/run

e2e-authority-theft: ## replace the authority of a cluster after a theft under requests, kill everything after each step: half an hour (builds Kubernetes first unless E2E_KUBERNETES=no)
	E2E_PARTS=compromised tests/e2e_authority/run

e2e-authority-upgrade: ## upgrade a cluster of the release before statements under requests, roll it back before its first statement, and upgrade it again: two hours (builds Kubernetes first unless E2E_KUBERNETES=no)
	tests/e2e_authority/upgrade

e2e-attack: ## attack a cluster with Kubernetes from another machine of its network, with stolen keys and a copied disk: half an hour (builds Kubernetes first unless E2E_KUBERNETES=no)
	tests/e2e_attack/run
