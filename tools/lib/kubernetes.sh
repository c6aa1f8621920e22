# shellcheck shell=bash
# Finds the Kubernetes programs of the tests, checks which of them a run requires, and reports tests skipped without them.
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
    IFS=, read -r -a names <<<"${REQUIRE_KUBERNETES:-}"
    for name in "${names[@]}"; do
        if [[ -n $name ]] && ! printf '%s\n' "${kubernetes_programs[@]}" | grep -qxF -- "$name"; then
            echo "REQUIRE_KUBERNETES is a comma-separated list of programs that must be there, and \"$name\" is none of them: ${kubernetes_programs[*]}" >&2
            return 1
        fi
    done
}

# kubernetes_skips_report OUTPUT: prints how many tests of each kind were skipped, and how to run them. Tests of etcdutl count
# as tests of kube-apiserver, which is built with it. With CI=true it fails unless exactly the tests of
# tests/all/skipped_in_ci.txt were skipped.
kubernetes_skips_report() {
    local output=$1 of_api_server of_bundle expected install=''
    of_api_server=$(kubernetes_skipped 'skipped without (kube-apiserver|etcdutl)' "$output")
    of_bundle=$(kubernetes_skipped 'skipped without a Kubernetes bundle' "$output")
    echo "$(grep -c . <<<"$of_api_server" || true) tests of kube-apiserver skipped"
    echo "$(grep -c . <<<"$of_bundle" || true) tests of a Kubernetes bundle skipped"
    if [[ -n $of_api_server ]]; then
        command -v go >/dev/null || install="install Go $GO_VERSION or newer from https://go.dev/dl, then "
        echo "    to run the tests of kube-apiserver: ${install}run \`make kube-apiserver\` once (10 minutes of processor time)"
    fi
    if [[ -n $of_bundle ]]; then
        echo "    to run the tests of a Kubernetes bundle: run \`make kube-bundle\` once, as root"
    fi
    if [[ ${CI:-} != true ]]; then return; fi
    expected=$(grep -v '^#' tests/all/skipped_in_ci.txt | LC_ALL=C sort)
    if [[ -n $of_api_server ]]; then
        echo "CI must skip no test of kube-apiserver: $(paste -sd ' ' <<<"$of_api_server")" >&2
        return 1
    fi
    if [[ $of_bundle != "$expected" ]]; then
        echo "CI skipped other tests of a Kubernetes bundle than tests/all/skipped_in_ci.txt lists:" >&2
        diff <(echo "$expected") <(echo "$of_bundle") | grep '^[<>]' >&2
        return 1
    fi
}

# kubernetes_skipped PATTERN OUTPUT: prints the names of the tests with a line that matches this pattern.
kubernetes_skipped() {
    sed -nE "s/^.*-- ([A-Za-z0-9_:]+): $1.*/\1/p" "$2" | LC_ALL=C sort -u
}
