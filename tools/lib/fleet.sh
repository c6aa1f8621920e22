# shellcheck shell=bash
# Machines of an end-to-end test that become nodes of a cluster, and the shepherd that creates the cluster.
#
# Sourced together with machines.sh and verdict.sh by scripts that set $programs, the directory of shepherd and shepherdctl,
# $agent, the role server's program, and $installed, its path on the machines' disks.

# Starts a machine with its own control groups and a disk that survives its end. It starts its role server when it boots.
start_machine() {
    local directory=${scratch:?}/m$1 controller
    new_machine "$1" 22
    install -d -m 755 "$directory/disk"
    # A group of its own in each existing hierarchy, because a real machine has the hierarchies to itself.
    for controller in memory cpu pids unified; do
        if [[ -e /sys/fs/cgroup/$controller/cgroup.procs ]]; then
            echo "/sys/fs/cgroup/$controller/$(basename "$scratch")/m$1"
        fi
    done >"$directory/groups"
    if [[ ! -s $directory/groups ]]; then
        echo "/sys/fs/cgroup/$(basename "$scratch")/m$1" >"$directory/groups"
    fi
    # Starts what the takeover installed, as an init system does at boot.
    cat >"$directory/boot" <<-END
		#!/bin/sh
		[ ! -x ${installed:?} ] || exec setsid $installed supervise --state_dir /var/lib/roleserver >>/var/lib/boot.log 2>&1
	END
    chmod 755 "$directory/boot"
    boot_machine "$1"
}

# device_list NUMBER…: prints the provider's device list with these machines.
device_list() {
    local number separator=''
    echo '['
    for number in "$@"; do
        printf '%s  {"ID": "m%s", "Addr": "192.0.2.1%s", "Location": "rack %s"}' "$separator" "$number" "$number" "$((number % 3))"
        separator=$',\n'
    done
    printf '\n]\n'
}

start_shepherd() {
    local unsigned=()
    # A release from before signed releases has no such flag, and needs none.
    if [[ $("${programs:?}/shepherd" --help) == *--allow_unsigned_releases* ]]; then
        unsigned=(--allow_unsigned_releases true)
    fi
    # A checkout may belong to another user than root, who runs this: then its program is not trusted.
    install -m 755 "${agent:?}" "$scratch/agent"
    RUST_LOG=info SHEPHERD_LOG_FORMAT=text "${programs:?}/shepherd" \
        --provider static --provider_name rack --static_device_list_url "file://$scratch/devices.json" \
        --agent_executable_path "$scratch/agent" --agent_target_path "$installed" \
        --agent_endpoint 192.0.2.2:8443 --agent_listen_address 192.0.2.2:8443 \
        --ssh_user root --ssh_key_path "$scratch/ssh_key" --secrets_key_path "$scratch/secrets.key" \
        --initializer_loop_parallelism 6 --recoverer_loop_parallelism 6 --provisioner_max_machines 0 \
        --provisioner_reconciler_rate 1s,1 --provisioner_device_creation_rate 100ms,6 \
        "${unsigned[@]}" \
        --heartbeat_interval 2s --recovery_first_heartbeat_timeout 60s --recovery_silence_timeout 60s \
        --recovery_ladder restart-agent:20s:1 --recovery_brake_window 1s \
        --agent_start_backoff_initial 1s --agent_start_backoff_maximum 5s --outward_call_timeout 10s \
        >>"$scratch/shepherd.log" 2>&1 &
    # shellcheck disable=SC2034 # the sourcing script ends it
    shepherd=$!
}

# The documented time of a stop is the default of --shutdown_grace, 30 s, plus 20 s. A busy host gets 5 s more.
shepherd_ends() {
    local end=$((SECONDS + 55))
    kill -TERM "$shepherd"
    while kill -0 "$shepherd" 2>/dev/null; do
        [[ $SECONDS -lt $end ]] || { echo "it still runs after 55 s"; return 1; }
        sleep 0.2
    done
}

number_of() { echo "${1#m}"; }
address_of() { echo "192.0.2.1$(number_of "$1")"; }

# The one cluster of the test. A release from before the documents of the API prints it within `cluster`, with other spellings
# of its fields. A shepherdctl of this release refuses the schema of such a shepherd.
cluster() {
    ctl cluster describe ams -o json | jq '
        def camel: gsub("_(?<first>[a-z])"; .first | ascii_upcase);
        if has("cluster") then .cluster | walk(if type == "object" then with_entries(.key |= camel) else . end) else . end'
}
part() { cluster | jq -r --arg part "$1" '.machines[] | select(.part == $part) | .name'; }

# Processes of a name on a machine, as `pid start`. The start time distinguishes two processes with the same pid.
processes() {
    # shellcheck disable=SC2016 # the machine's shell expands these
    in_machine "$(number_of "$1")" bash -c 'for pid in $(pgrep -x "$1"); do echo "$pid $(cut -d" " -f22 "/proc/$pid/stat")"; done' - "$2"
}
# After an update, the process has the name of the other release's file.
role_server() { in_machine "$(number_of "$1")" pgrep -f '^[^ ]*roleserver[^ /]* run'; }

is_true() { is "$(query "$1")" t; }

# The most recent update.
last_update() { ctl get updates -o json | jq '[.updates[]] | max_by(.createdAt)'; }
stage_of_update() { last_update | jq -r '.outcome // (if .pauseReason then "paused" else "rolling" end)'; }
update_is() { is "$(stage_of_update)" "$1"; }
# run_release FILE COUNT: whether exactly COUNT machines report that they run that release.
run_release() {
    echo "SELECT count(*) = $2 FROM machine_release_report WHERE sha256 = decode('$(sha256sum <"$1" | cut -d' ' -f1)', 'hex')"
}
# The release is a file of the run's directory.
add_release() { ok "the release $1 is added" ctl artefacts add "${scratch:?}/$1" --name "$1" --reason "the release $1"; }
# update_to RELEASE COUNT: rolls the release out to all machines of the test, which are that many.
update_to() {
    order_update "$@"
    update_finishes
}
# order_update RELEASE COUNT: the same, until all of them run it. The update ends later, once they have been well for a while.
order_update() {
    ok "the update of all machines to $1 is ordered" ctl update --selector '' --release "$1" --parallelism 2 --reason "$1 is to run"
    essential
    eventually $((150 * $2)) "all $2 run $1" is_true "$(run_release "$scratch/$1" "$2")"
    essential
}
update_finishes() {
    eventually 180 "and the update is finished" update_is finished
    essential
}
differ() { [[ $1 != "$2" ]] || { echo "both are $1"; return 1; }; }
