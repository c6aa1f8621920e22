# shellcheck shell=bash
# Finds the Kubernetes programs of the tests, and checks which of them a run requires.
#
# Sourced by scripts that run in the root of the checkout. tests/all/harness/kubernetes.rs does the same in the tests.

# shellcheck source=tools/lib/kubernetes-versions.sh
source tools/lib/kubernetes-versions.sh

# The names that REQUIRE_KUBERNETES may list.
kubernetes_programs=(kube-apiserver etcd etcdutl kube-controller-manager kube-scheduler kubelet kube-proxy bundle)

# Prints the folder that tools/kubernetes builds into. Fails if the environment defines none.
kubernetes_cache() {
    local base=${XDG_CACHE_HOME:-}
    # By convention a relative path is ignored.
    if [[ $base != /* ]]; then base=${HOME:-}/.cache; fi
    [[ $base == /* && $base != /.cache ]] || return 1
    echo "$base/shepherd"
}

# Rejects a REQUIRE_KUBERNETES that lists an unknown name.
kubernetes_requirements_check() {
    local name
    local -a names
    # A line feed separates nothing: it becomes part of a name that is unknown.
    IFS=, read -r -d '' -a names < <(printf '%s\0' "${REQUIRE_KUBERNETES:-}")
    for name in "${names[@]}"; do
        if [[ -n $name && ($name == *[[:space:]]* || " ${kubernetes_programs[*]} " != *" $name "*) ]]; then
            echo "REQUIRE_KUBERNETES is a comma-separated list of programs that must be there, and \"${name//$'\n'/\\n}\" is none of them: ${kubernetes_programs[*]}" >&2
            return 1
        fi
    done
}
