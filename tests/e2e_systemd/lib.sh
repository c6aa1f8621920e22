# shellcheck shell=bash
# Machines with systemd, and role servers that end in every way: how they are reached, what runs on them, and the events
# after which the same processes have to run with the same limits.
#
# Sourced after verdict.sh, machines.sh and fleet.sh by scripts that set $programs, the directory of shepherd and shepherdctl,
# and $image, the directory that tools/systemd-image prints. They set $member and $worker, the names of the two machines,
# and define limits_of, unit_is_empty and write_role.

# Without these options, SSH into a machine that shuts down hangs for ever.
ssh_options=(-F none -o IdentitiesOnly=yes -o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR
    -o UserKnownHostsFile=/dev/null -o ConnectTimeout=60 -o ServerAliveInterval=2 -o ServerAliveCountMax=10)
# ssh_to MACHINE WORD…: runs ssh, through the open connection if there is one. It reads this script's standard input.
ssh_to() {
    local name=$1
    shift
    timeout 100 ssh "${ssh_options[@]}" -i "${image:?}/ssh_key" -o "ControlPath=${scratch:?}/ssh-$name" "$@"
}
on() { # on MACHINE COMMAND
    local name=$1
    shift
    ssh_to "$name" "root@$(address_of "$name")" "$@" </dev/null
}
# Opens the connection to a machine that all calls share: each handshake takes an emulated machine seconds.
open_connection() {
    rm -f "$scratch/ssh-$1"
    ssh_to "$1" -o ControlMaster=yes -f -N "root@$(address_of "$1")" </dev/null >>"$scratch/ssh.log" 2>&1
    on "$1" true
}
boot_of() { on "$1" cat /proc/sys/kernel/random/boot_id; }

start_own_shepherd() { # start_own_shepherd ROLE-SERVER SILENCE
    RUST_LOG=info SHEPHERD_LOG_FORMAT=text "${programs:?}/shepherd" \
        --provider static --provider_name rack --static_device_list_url "file://$scratch/devices.json" \
        --agent_executable_path "$1" \
        --agent_endpoint 192.0.2.2:8443 --agent_listen_address 192.0.2.2:8443 \
        --ssh_user root --ssh_key_path "$image/ssh_key" --secrets_key_path "$scratch/secrets.key" \
        --initializer_loop_parallelism 2 --recoverer_loop_parallelism 2 \
        --provisioner_max_machines 0 --provisioner_reconciler_rate 1s,1 --provisioner_device_creation_rate 100ms,6 \
        --allow_unsigned_releases true \
        --heartbeat_interval 2s --recovery_first_heartbeat_timeout 5m --recovery_silence_timeout "$2" \
        --recovery_ladder restart-agent:5m:2 --recovery_brake_window 1s \
        --agent_start_backoff_initial 1s --agent_start_backoff_maximum 5s --outward_call_timeout 20s \
        --agent_ssh_greeting_timeout 60s --agent_ssh_login_timeout 60s --agent_ssh_exec_timeout 5m \
        >>"$scratch/shepherd.log" 2>&1 &
    # shellcheck disable=SC2034 # shepherd_ends ends it
    shepherd=$!
}

# ---------------------------------------------------------------- what runs

# How many services the worker has, the kinds of programs of both machines (their names, sorted), and how many of them a
# role server adopts when it starts: those that it started itself.
services=0 kinds='' member_adopts=1 worker_adopts=0
# An extended regular expression for the command lines of these programs, and one for the names of those in pods. A pattern
# that does not begin with ^ has brackets, so that it does not match the shell that searches for it.
programs_pattern='^/usr/bin/etcd |^/usr/sbin/runc .* run |^/bin/hold$|^/usr/bin/sleep 1000000'
pod_programs='^(pause|pod)$'
# What is compared after each event: the programs, and their limits.
running='' limits=''

settled() {
    local now
    now=$(cluster)
    is "$(jq -r .stage <<<"$now")" converged
    is "$(jq -r '"\(.voters) \(.votersReached)"' <<<"$now")" "1 1"
    is "$(jq '[.machines[] | select(.part == "worker") | .services[] | select(.state == "healthy")] | length' <<<"$now")" "$services"
}

# Programs of a machine that have to outlive its role server, as `name pid start group`; health checks end by themselves. The
# machine's bash starts no program for this but pgrep: each takes an emulated machine a tenth of a second.
# shellcheck disable=SC2016 # the machine's shell expands it
programs_of() {
    on "$1" "for pid in \$(pgrep -f '$programs_pattern'); do"'
        {
            read -r name <"/proc/$pid/comm" && read -r stat <"/proc/$pid/stat" || continue
            group=""
            while IFS=: read -r _ controllers path; do
                case $controllers in
                name=systemd) group=$path ;;
                "") group=${group:-$path} ;;
                esac
            done <"/proc/$pid/cgroup"
        } 2>/dev/null
        set -- ${stat##*) }
        echo "$name $pid ${20} $group"
    done'
}
# of_both COMMAND…: prints what the command prints for the member, then for the worker. Both are called at the same time.
of_both() {
    local of_member of_worker code=0
    # Both are called outside of a condition: there, `set -e` would have no effect within the command.
    "$@" "${member:?}" >"$scratch/of-member" &
    of_member=$!
    "$@" "${worker:?}" >"$scratch/of-worker" &
    of_worker=$!
    wait "$of_member" || code=1
    wait "$of_worker" || code=1
    cat "$scratch/of-member" "$scratch/of-worker"
    return "$code"
}
all_programs() { of_both programs_of; }
kinds_of() { cut -d ' ' -f 1 <<<"$1" | LC_ALL=C sort | xargs; }
without_groups() { cut -d ' ' -f 1-3 <<<"$1"; }
# Records what runs now: each kind of program, exactly once.
record_programs() {
    local now
    now=$(all_programs)
    is "$(kinds_of "$now")" "$kinds"
    echo "$now" >"$scratch/programs"
}
programs_are() {
    local now
    now=$(all_programs)
    is "$(kinds_of "$now")" "$kinds"
    is "$now" "$running"
}
processes_are() {
    local now
    now=$(all_programs)
    is "$(without_groups "$now")" "$(without_groups "$running")"
}
each_in_a_scope() {
    local others
    others=$(awk -v pods="$pod_programs" '$1 !~ pods && $4 !~ "^/shepherd.slice/shepherd-[^/]*[.]scope(/|$)"' <<<"$running")
    [[ -n $running ]]
    is "$others" ""
}
each_in_the_unit() {
    [[ -n $running ]]
    is "$(awk -v pods="$pod_programs" '$1 !~ pods && $4 !~ "^/system.slice/roleserver.service(/|$)"' <<<"$running")" ""
}
# The script defines limits_of MACHINE, which prints the limits that hold: what systemd stores, and what the kernel has.
all_limits() { of_both limits_of; }
record_limits() {
    local now
    now=$(all_limits)
    echo "$now" >"$scratch/limits"
}
limits_are() {
    local now
    now=$(all_limits)
    [[ -n $limits ]]
    is "$now" "$limits"
}
limits_contain() { # limits_contain WORDS…
    local words
    for words in "$@"; do
        grep -qwF -- "$words" <<<"$limits" || { echo "none of these is $words:"; echo "$limits"; return 1; }
    done
}
# Compares from now on with what runs now.
record() { # record WHEN
    eventually 60 "$1: each kind of program runs once: $kinds" record_programs
    essential
    ok "$1: its limits can be read" record_limits
    essential
    running=$(<"$scratch/programs") limits=$(<"$scratch/limits")
    printf '%s\n' "$running" "$limits" | sed 's/^/#   /'
}

# ---------------------------------------------------------------- role servers

main_pid() { on "$1" systemctl show -p MainPID --value roleserver; }
declare -A pid_before=()
# Records the process of the role server.
record_role_server() {
    pid_before[$1]=$(main_pid "$1")
    [[ ${pid_before[$1]} =~ ^[1-9][0-9]*$ ]] || { echo "# $1: no role server runs (MainPID ${pid_before[$1]})"; exit 1; }
}
runs_another() { # runs_another MACHINE
    local now
    now=$(on "$1" 'systemctl show -p MainPID,ActiveState,ExecMainStatus roleserver' | sort | xargs)
    echo "$now, was ${pid_before[$1]}"
    [[ $now =~ ^ActiveState=active\ ExecMainStatus=0\ MainPID=([1-9][0-9]*)$ ]]
    [[ ${BASH_REMATCH[1]} != "${pid_before[$1]}" ]]
}
# works MACHINE: since its start, the role server has adopted at least so many programs as have to be adopted there, and it
# reports that the control plane runs, or that each service is healthy. A program that it ended and started again is not
# adopted.
works() {
    local page adopts=$worker_adopts
    [[ $1 != "$member" ]] || adopts=$member_adopts
    on "$1" "awk '/the agent runs/ { n = 0 } /was adopted/ { n++ } END { print n + 0, \"adopted\"; exit (n < $adopts) }' /var/lib/roleserver/agent.log"
    # shellcheck disable=SC2016 # the machine's shell expands it
    page=$(on "$1" '"/proc/$(systemctl show -p MainPID --value roleserver)/exe" metrics --state_dir /var/lib/roleserver')
    if [[ $1 == "$member" ]]; then
        grep -qx 'roleserver_control_plane_running 1' <<<"$page"
    else
        is "$(grep -c '^roleserver_service_state{.*state="healthy"} 1$' <<<"$page")" "$services"
    fi
}
each_works() { of_both works; }
survived() { # survived EVENT
    adopted "$1"
    eventually 30 "$1: their limits are the same" limits_are
}
adopted() { # adopted EVENT
    eventually 120 "$1: the role servers have adopted what runs, and find it well" each_works
    eventually 30 "$1: the same processes run, and no others" programs_are
}

unit_has() { on "$1" "systemctl cat roleserver | grep -F '$2'"; }
unit_is_plain() {
    local now
    now=$(on "$1" 'systemctl show -p KillMode,Delegate roleserver | sort | xargs')
    is "$now" "Delegate=no KillMode=control-group"
}
# Takeovers and steps of recovery that have begun on a machine.
takeovers() {
    query "SELECT count(*) FROM history JOIN machine_provided USING (machine_id)
        WHERE provider_id = '$1' AND edge = 'start' AND process IN ('AgentStart', 'Recovery')"
}
more_takeovers() { [[ $(takeovers "$1") -gt $2 ]]; }
no_issue_of() {
    local found
    found=$(ctl issues -o json | jq -c '.issues[] | select(.id == "agent-unit" or .id == "workloads-end-with-agent")')
    is "$found" ""
}

# ---------------------------------------------------------------- the role

# The memory of the service by path, and the tasks of the other, without those of runc.
front_memory=64MiB rooted_tasks=30
# The processors of both. A role server of the release before has no control of them where cgroup v2 is alone: there it starts
# no service with such a limit.
front_processors='processors = 0.5, ' rooted_processors='processors = 0.25, '
# Writes the role web with two services, to which a script may append others.
write_services() {
    cat >"$scratch/web.toml" <<-END
		role = "web"
		[[service]]
		name = "front"
		program = "/usr/bin/sleep"
		arguments = ["1000000"]
		user = "nobody"
		limits = { memory = "$front_memory", ${front_processors}tasks = 20 }
		health = { exec = ["/usr/bin/true"], interval = "10s", timeout = "10s" }
		[[service]]
		name = "rooted"
		archive = "$(sha256sum <"$scratch/tree.tar" | cut -d' ' -f1)"
		program = "/bin/hold"
		user = "1000"
		limits = { memory = "96MiB", ${rooted_processors}tasks = $rooted_tasks }
		health = { exec = ["/bin/hold", "well"], interval = "20s", timeout = "20s" }
	END
}
# A program that runs until SIGTERM, and ends at once when it has an argument.
build_hold() {
    cc -static -Os -o "$scratch/hold" -x c - <<-'END'
		#include <unistd.h>
		#include <signal.h>
		#include <stdlib.h>
		static void end(int signal) { (void)signal; _exit(0); }
		int main(int count, char **arguments) {
		    if (count > 1) return 0;
		    signal(SIGTERM, end);
		    for (;;) pause();
		}
	END
    mkdir -p "$scratch/tree/bin"
    cp "$scratch/hold" "$scratch/tree/bin/hold"
    tar -C "$scratch/tree" -cf "$scratch/tree.tar" bin
}

# ---------------------------------------------------------------- the events

# The release before knows no scopes: it has its programs below the group of the unit. The script defines
# unit_is_empty MACHINE: no program is in the group of the unit any more.
# What runc refuses its container is refused in the scope as well. /dev/vda exists on a machine of QEMU, which has version 2.
# shellcheck disable=SC2016 # the machine's shell expands it
devices_are_refused() {
    on "$worker" 'cd /sys/fs/cgroup; has_lists=no
    # A service can have several scopes.
    for list in devices/shepherd.slice/*-web_rooted-*.scope/devices.list; do
        [ -e "$list" ] || continue
        has_lists=yes
        echo "$list:"
        cat "$list"
        grep -q "^c 1:3 " "$list" || exit 1
        # Besides those of runc, the two that systemd mounts over what is inaccessible.
        if grep -vE "^(c (0:0|1:[35789]|5:[02]|136:[*])|b 0:0) " "$list"; then exit 1; fi
    done
    if [ "$has_lists" = no ]; then
        # Its own group, or that of runc: a move that was interrupted is completed with the container beside runc.
        group=$(cut -d : -f 3 "/proc/$(pgrep -x hold)/cgroup")
        case $group in /shepherd.slice/*-web_rooted-*.scope/*) ;; *) exit 1 ;; esac
        echo $$ >"/sys/fs/cgroup$group/cgroup.procs" && head -c 1 /dev/zero >/dev/null && ! head -c 1 /dev/vda >/dev/null
    fi'
}
another_shepherd() { # another_shepherd SILENCE
    ok "the shepherd ends" shepherd_ends
    essential
    start_own_shepherd "$scratch/current" "$1"
    eventually 120 "another shepherd answers" ready_count 2
    essential
}
# taken_over MACHINE: its role server hangs, and a takeover by SSH restarts it.
taken_over() {
    local before
    before=$(takeovers "$1")
    record_role_server "$1"
    # It hangs, so that systemd has to restart a unit that runs.
    ok "the role server of $1 hangs" on "$1" kill -STOP "${pid_before[$1]}"
    eventually 300 "$1: a takeover by SSH restarts a role server that hangs" runs_another "$1"
    essential
    ok "$1: a shepherd began it" more_takeovers "$1" "$before"
}
# The enrolment of this release has to move what runs in the group of the unit before it restarts the unit.
takeover_of_the_previous_release() {
    echo "# the worker is taken over from the previous release"
    another_shepherd 20s
    taken_over "$worker"
    eventually 120 "it runs this release" is_true "SELECT sha256 = decode('$(sha256sum <"$scratch/current" | cut -d' ' -f1)', 'hex')
        FROM machine_release_report JOIN machine_provided USING (machine_id) WHERE provider_id = '$worker'"
    eventually 120 "its role server has adopted what runs, and finds it well" works "$worker"
    eventually 30 "after the takeover from the previous release: the same processes run, and no others" processes_are
    eventually 60 "$worker: the unit is that of this release" unit_has "$worker" 'a drop-in is kept'
    eventually 60 "$worker: the group of its unit has the role server alone" unit_is_empty "$worker"
    eventually 240 "it is settled" settled
    # An update may take an emulated machine longer than this shepherd waits for a heartbeat.
    another_shepherd 10m
}
from_the_previous_release() {
    local name
    echo "# the previous release, this one, and back"
    record "with the previous release"
    ok "each program is in the group of the unit" each_in_the_unit
    for name in "$member" "$worker"; do
        ok "$name: the unit is that of the previous release" unit_has "$name" 'changes are overwritten'
    done
    takeover_of_the_previous_release
    add_release previous
    add_release current
    update_to current 2
    eventually 120 "after the update to this release: the same processes run, and no others" processes_are
    for name in "$member" "$worker"; do
        eventually 60 "$name: the unit is that of this release" unit_has "$name" 'a drop-in is kept'
        eventually 60 "$name: the group of its unit has the role server alone" unit_is_empty "$name"
    done
    record "after the update to this release"
    ok "each program is in a scope of shepherd.slice" each_in_a_scope
    ok "the service in a root filesystem is still refused devices" devices_are_refused
    survived "after the update to this release"
    update_to previous 2
    survived "back at the previous release"
    update_to current 2
    survived "again at this release"
}

reload() { on "$1" systemctl daemon-reload; }
restarts() {
    local name turn
    echo "# kill -9, restarts"
    for name in "$member" "$worker"; do
        record_role_server "$name"
        ok "$name: its role server is killed with SIGKILL" on "$name" kill -KILL "${pid_before[$name]}"
    done
    for name in "$member" "$worker"; do
        eventually 60 "$name: systemd starts the role server again after kill -9" runs_another "$name"
        essential
    done
    adopted "after kill -9"
    for turn in 1 2 3; do
        for name in "$member" "$worker"; do
            record_role_server "$name"
            ok "$name: restart $turn of the unit is requested" on "$name" systemctl --no-block restart roleserver
        done
        for name in "$member" "$worker"; do
            eventually 60 "$name: another role server runs after restart $turn" runs_another "$name"
            essential
        done
        adopted "after restart $turn"
    done
    eventually 120 "it is settled" settled
}

both_have_failed() {
    local now
    now=$(last_update | jq -r '"\(.outcome) \(.counts.failed)"')
    is "$now" "finished 2"
}
releases() {
    echo "# another release, and one that crashes at its start"
    cp "$scratch/current" "$scratch/next"
    echo 'another release' >>"$scratch/next"
    printf '#!/bin/sh\nexit 1\n' >"$scratch/bad"
    add_release next
    order_update next 2
    survived "after the update"
    # Meanwhile the update waits until both have been well for a while.
    ok "daemon-reload on both" of_both reload
    survived "after daemon-reload"
    update_finishes
    add_release bad
    # Both get the order in the same pass over the update, so that the failure of one does not keep it from the other.
    eventually 120 "it is settled" settled
    ok "the update of both to it is ordered" ctl update --selector '' --release bad --parallelism 2 --reason 'a mistake'
    # With a result for each machine, nothing is left to pause.
    eventually 240 "both machines have given it up, and the update has ended" both_have_failed
    essential
    eventually 60 "both run the release before it" is_true "$(run_release "$scratch/next" 2)"
    survived "after the roll-back"
}

takeover_by_ssh() {
    local name
    echo "# limits change, and both machines are taken over"
    front_memory=80MiB rooted_tasks=40
    write_role
    ok "the role web is declared with other limits" ctl cluster declare ams "$scratch/web.toml" --reason 'more'
    eventually 60 "systemd has them for the service by path" on "$worker" 'systemctl show -p MemoryMax "shepherd-*front-*.scope" | grep -x MemoryMax=83886080'
    eventually 60 "and for the other, with the tasks of runc" on "$worker" 'systemctl show -p TasksMax "shepherd-*rooted-*.scope" | grep -x TasksMax=104'
    eventually 30 "and the same processes run" programs_are
    record "with other limits"
    another_shepherd 20s
    for name in "$worker" "$member"; do
        taken_over "$name"
        survived "after the takeover of $name"
        eventually 240 "it is settled" settled
    done
}

# both_reboot KINDS: these kinds of programs run again afterwards.
both_reboot() {
    local name
    local -A boot_before=()
    echo "# both are rebooted"
    for name in "$member" "$worker"; do
        boot_before[$name]=$(boot_of "$name")
        on "$name" systemctl --no-block reboot || true
    done
    for name in "$member" "$worker"; do
        eventually 300 "$name: it was rebooted" rebooted "$name" "${boot_before[$name]}"
        essential
    done
    kinds=$1
    eventually 300 "everything is started again" record_programs
    essential
    eventually 240 "it is settled" settled
    record "after the reboot"
    ok "each program is in a scope of shepherd.slice" each_in_a_scope
    ok "systemd and the kernel have the declared limits" limits_contain MemoryMax=83886080 TasksMax=104 pids.max:104
}
rebooted() {
    local now
    open_connection "$1"
    now=$(boot_of "$1")
    [[ -n $now && $now != "$2" ]]
}

# Prints what the machines printed last if something is not true, and the result.
end() {
    local code=$? file
    trap - EXIT
    set +e
    # shellcheck disable=SC2154 # set in verdict.sh
    if [[ $code -ne 0 || $failed -gt 0 ]]; then
        for file in "$scratch"/m[12].{qemu,serial,console}; do
            [[ -s $file ]] || continue
            echo "# the last lines of $(basename "$file"):"
            tail -n 15 "$file" | tr -d '\r'
        done
    fi
    (exit "$code")
    finish
}
