# shellcheck shell=bash
# A cluster of three members and two workers, with and without Kubernetes, that gets requests all the time, and what is read
# of its authority.
#
# Sourced after verdict.sh, machines.sh and fleet.sh. Besides what those require, it sets $members and $workers, and $on, the
# machines that are on. A script that sets $worker_count gets a cluster with that many workers, and the other machines stay
# free. With $images, a list of NAME=REFERENCE=FILE.tar, the bundle contains these images. E2E_PROGRAMS is a directory with
# programs to run instead of building them.
# shellcheck disable=SC2034 # used by the scripts that source this

profile=${E2E_PROFILE:-release}
programs=${CARGO_TARGET_DIR:-target}/programs
agent=target-roleserver/roleserver
if [[ $profile == debug ]]; then
    programs=${CARGO_TARGET_DIR:-target}/debug
    agent=$programs/roleserver
fi
if [[ -n ${E2E_PROGRAMS:-} ]]; then
    programs=$E2E_PROGRAMS
    agent=$programs/roleserver
fi
worker_count=2
images=()
# On the machines' disks.
installed=/var/lib/shepherd/roleserver
on=(m1 m2 m3 m4 m5)
members=() workers=()
# The clients that send requests.
requesting=()

# ---------------------------------------------------------------- outside

build_programs() {
    tools/need cc etcd postgres sshd ip unshare jq curl python3
    [[ -z ${E2E_PROGRAMS:-} ]] || return 0
    case $profile in
    debug) cargo build --bins ;;
    *)
        tools/roleserver
        tools/programs
        ;;
    esac
}

# Sets $bundle to a bundle of Kubernetes, or to nothing without Kubernetes.
find_bundle() {
    local image
    local -a arguments=()
    bundle=''
    if [[ ${E2E_KUBERNETES:-} == no ]]; then
        echo "# without Kubernetes, as E2E_KUBERNETES orders"
        return
    fi
    tools/need kubectl iptables conntrack containerd cni-plugins runc
    for image in "${images[@]}"; do arguments+=(--image "$image"); done
    bundle=$(tools/kube-bundle --name first --out "$PWD/target/e2e-authority" "${arguments[@]}" | tee >(cat >&2) | tail -n 1)
}

# ---------------------------------------------------------------- the cluster

# prepare DIRECTORY: what each run begins with.
prepare() {
    scratch=$1
    trap finish EXIT
    trap 'exit 130' INT TERM
    umask 022
    ssh-keygen -q -t ed25519 -N '' -C '' -f "$scratch/ssh_key"
    database_password=db$(head -c 18 /dev/urandom | base64 | tr -dc a-zA-Z0-9)
    mkdir "$scratch/requests"
}

start_cluster() {
    local number
    local -a kubernetes=()
    start_network
    start_database
    for number in 1 2 3 4 5; do
        start_machine "$number"
        # The kubelet requires a default route.
        ip -n "m$number" route add default via 192.0.2.1
    done
    device_list 1 2 3 4 5 >"$scratch/devices.json"
    start_shepherd
    echo "# five machines, from nothing to a cluster"
    eventually 240 "5 of 5 machines are Ready" ready_count 5
    essential
    if [[ -n ${bundle:-} ]]; then
        ok "a bundle is added" ctl artefacts add "$bundle" --name first --reason 'Kubernetes'
        kubernetes=(--kubernetes-bundle first)
    fi
    ok "a cluster of 3 + $worker_count is created" \
        ctl cluster create ams --control-plane 3 --workers "$worker_count" --role web "${kubernetes[@]}" --reason 'the new hall'
    essential
    printf '%s\n' 'role = "web"' '[[service]]' 'name = "front"' 'program = "/usr/bin/tail"' \
        'arguments = ["-f", "/dev/null"]' 'user = "nobody"' >"$scratch/web.toml"
    ok "the role web is declared to it" ctl cluster declare ams "$scratch/web.toml" --reason 'the front'
    eventually 600 "it is settled: 3 of 3 members vote, and everything on all $((3 + worker_count)) nodes is healthy" settled
    essential
    mapfile -t members < <(part control-plane | sort)
    mapfile -t workers < <(part worker | sort)
    echo "# members ${members[*]}, workers ${workers[*]}"
}

# Each machine is a healthy node, each worker runs the service, and each node all its components of Kubernetes.
settled() {
    local now components=0
    [[ -z ${bundle:-} ]] || components=$((9 + 3 * worker_count))
    now=$(cluster)
    is "$(jq -r '"\(.stage), \(.voters) \(.votersReached)"' <<<"$now")" "converged, 3 3"
    is "$(jq '[.machines[] | select(.health == "healthy")] | length' <<<"$now")" "$((3 + worker_count))"
    is "$(jq '[.machines[] | select(.part == "worker") | .services[] | select(.state == "healthy")] | length' <<<"$now")" "$worker_count"
    is "$(jq '[.machines[].kubernetes.components[]? | select(.state == "healthy")] | length' <<<"$now")" "$components"
}
service_processes() {
    local name
    for name in "$@"; do echo "$name $(processes "$name" tail)"; done
}
node_of() { cluster | jq -r --arg name "$1" '.machines[] | select(.name == $name) | .node'; }

# ---------------------------------------------------------------- requests

client() { tests/e2e_authority/client "$@"; }
addresses() {
    local name
    for name in "${members[@]}"; do address_of "$name"; done
}

# Starts the clients.
start_requests() {
    local -a addresses
    mapfile -t addresses < <(addresses)
    ln -sfn "$(realpath "$programs/shepherdctl")" "$scratch/requests/shepherdctl"
    client requests "$scratch/requests" "$(node_of "${members[0]}")" "${addresses[@]}" >"$scratch/requests/curators.err" 2>&1 &
    requesting=($!)
    if [[ -n ${bundle:-} ]]; then
        client objects "$scratch/requests" "${addresses[@]}" >"$scratch/requests/api-servers.err" 2>&1 &
        requesting+=($!)
    fi
    eventually 240 "requests to the curators$([[ -z ${bundle:-} ]] || echo ' and the API servers') succeed" all_succeed
    essential
}
all_succeed() {
    local kind
    for kind in write read ${bundle:+write-object read-object}; do
        grep -q " $kind 1 ok" "$scratch/requests/log" || { echo "no $kind"; tail -n 5 "$scratch"/requests/*.err "$scratch/requests/orders"; return 1; }
    done
}
# none_failed SINCE [FROM TO]: how the requests since then went. No curator serves from FROM to TO, so a call to them that was
# under way meanwhile is counted apart, and may fail. Such a call began before TO, and ended after FROM.
# shellcheck disable=SC2016 # awk expands these
none_failed() {
    local all retried rate one gap=0
    [[ $# -eq 1 ]] || gap="\$1 + \$5 >= $2 && \$1 < $3 && (\$2 == \"write\" || \$2 == \"read\")"
    all=$(requests_since "$1") retried=$(requests_since "$1" '$3 > 1')
    rate=$(awk -v all="$all" -v from="$1" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.1f", all / (to - from) }')
    ok "$all requests were sent, $retried of them twice, and none failed" is \
        "$(requests_since "$1" "!($gap) && \$4 != \"ok\"")" 0
    [[ $# -eq 1 ]] || echo "# not counted: $(requests_since "$1" "$gap") calls to curators were under way while none served," \
        "and $(requests_since "$1" "$gap && \$4 != \"ok\"") of them failed"
    awk -v from="$1" '$1 >= from && $4 != "ok"' "$scratch/requests/log" | tail -n 10 | sed 's/^/#   /'
    ok "no request was sent more than twice: at most $(most_since "$1" 3) times" test "$(most_since "$1" 3)" -le 2
    echo "# a search for the leader called at most $(most_since "$1" 6) curators, and a request took at most" \
        "$(most_since "$1" 5) s with its retry"
    ok "they came at $rate per second, more than one" test "${rate%.*}" -ge 1
    for one in "${requesting[@]}"; do ok "the client $one still runs" kill -0 "$one"; done
}
# most_since TIME COLUMN: the highest number in a column of the log.
most_since() { awk -v from="$1" -v column="$2" '$1 >= from && $column > most { most = $column } END { print most + 0 }' "$scratch/requests/log"; }
# requests_since TIME [CONDITION]: how many there were.
requests_since() { awk -v from="$1" "\$1 >= from && (${2:-1}) { count++ } END { print count + 0 }" "$scratch/requests/log"; }
end_requests() {
    local one
    for one in "${requesting[@]}"; do
        kill -TERM "$one"
        wait "$one" || true
    done
}

# ---------------------------------------------------------------- the authority

# The stage of its replacement.
stage() {
    local -a addresses
    mapfile -t addresses < <(addresses)
    client stage "$scratch/requests" "${addresses[@]}"
}
stage_is() {
    local now
    now=$(stage)
    is "$now" "$1"
}
# The authorities by the statement of a machine's curator, with the number of successions that lead to them; those by the
# statement on its disk, where the number depends on when the node joined; and those that its etcd reads.
served_authorities() { client authorities "$(address_of "$1")"; }
stored_authorities() { client authorities "$(statement_file "$1")" | sed 's/ [0-9]*$//'; }
etcd_authorities() { client authorities "$scratch/$1/disk/roleserver/cluster/etcd/ca.crt"; }
statement_file() { echo "$scratch/$1/disk/roleserver/cluster/statement.json"; }

# all_have AUTHORITY MACHINE…: these machines have stored a statement of this one alone.
all_have() {
    local name expected=$1 now
    shift
    for name in "$@"; do
        now=$(stored_authorities "$name")
        is "$name: $now" "$name: $expected"
    done
}
