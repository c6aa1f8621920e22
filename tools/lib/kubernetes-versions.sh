# shellcheck shell=bash
# shellcheck disable=SC2034 # used by the scripts that source this
# Versions of the Kubernetes programs that the tests use. tools/kubernetes builds them, and tests/all reads this file.
#
# After a change run tools/kubernetes-modules and commit what it writes.
KUBERNETES_VERSION=1.36.3
ETCD_VERSION=3.7.3
# The oldest Go that builds both.
GO_VERSION=1.26
