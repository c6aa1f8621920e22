# shellcheck shell=bash
# Reports the tests that were skipped because this host, or the user who ran them, lacks something.
#
# Sourced by scripts that run in the root of the checkout. A skipped test writes "-- NAME: skipped without THING: REMEDY":
# see crates/testkit/src/skip.rs.

# shellcheck source=tools/lib/kubernetes-versions.sh
source tools/lib/kubernetes-versions.sh

# skips_report OUTPUT: prints how many tests of each kind were skipped, and how to run them. Tests of etcdutl count as tests
# of kube-apiserver, which is built with it. With CI=true it fails unless exactly the tests of tests/all/skipped_in_ci.txt
# were skipped.
skips_report() {
    local output=$1 of_api_server of_bundle others expected install=''
    of_api_server=$(skipped_tests '(kube-apiserver|etcdutl)' "$output")
    of_bundle=$(skipped_tests 'a Kubernetes bundle' "$output")
    others=$(sed -nE 's/^.*-- ([A-Za-z0-9_:]+: skipped without .*)$/\1/p' "$output" |
        grep -vE ': skipped without (kube-apiserver|etcdutl|a Kubernetes bundle)' | LC_ALL=C sort -u || true)
    echo "$(grep -c . <<<"$of_api_server" || true) tests of kube-apiserver skipped"
    echo "$(grep -c . <<<"$of_bundle" || true) tests of a Kubernetes bundle skipped"
    echo "$(grep -c . <<<"$others" || true) other tests skipped"
    if [[ -n $others ]]; then
        echo "    ${others//$'\n'/$'\n'    }"
    fi
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
    if [[ -n $others ]]; then
        echo "CI must skip no test for another reason: $(paste -sd ';' <<<"$others")" >&2
        return 1
    fi
}

# skipped_tests THING OUTPUT: prints the names of the tests that were skipped without this thing, a pattern.
skipped_tests() {
    sed -nE "s/^.*-- ([A-Za-z0-9_:]+): skipped without $1.*/\1/p" "$2" | LC_ALL=C sort -u
}
