# shellcheck shell=bash disable=SC2154
# The part `patroni` of tests/e2e_database/run: two servers under Patroni with etcd, each at an address of its own. Fail-over
# and switch-over behind HAProxy, which checks with Patroni which server is the primary, and without it: by a URL with both
# hosts, and by a name that has both addresses.
#
# Sourced by that script, which has the functions and variables.

declare -A patroni_pids=()
etcd='' haproxy=''
# The same port at two addresses, as servers have it.
patroni_port=6010 haproxy_port=6020
patroni_hosts=(127.0.0.11 127.0.0.12)
patroni_list="127.0.0.11:$patroni_port,127.0.0.12:$patroni_port"

stop_patroni() {
    local host
    stop_process "$haproxy"
    for host in "${!patroni_pids[@]}"; do kill_node "$host"; done
    stop_process "$etcd"
}

# kill_node HOST: as a host that dies: nothing of Patroni or PostgreSQL there does anything more.
kill_node() {
    local pid
    [[ -n ${patroni_pids[$1]:-} ]] || return 0
    kill -KILL "${patroni_pids[$1]}" 2>/dev/null || true
    wait "${patroni_pids[$1]}" 2>/dev/null || true
    pid=$(head -n 1 "$scratch/server-$1/data/postmaster.pid" 2>/dev/null) || true
    [[ -z $pid ]] || kill -KILL "$pid" 2>/dev/null || true
    unset "patroni_pids[$1]"
}

# start_node HOST: starts Patroni with a server there. It takes over data that are there, and copies the primary otherwise.
start_node() {
    local base=$scratch/server-$1
    [[ -d $base ]] || as_server_user mkdir -m 700 "$base"
    cat >"$scratch/patroni-$1.yml" <<YAML
scope: shepherd
name: "$1"
restapi: {listen: "$1:8008", connect_address: "$1:8008"}
etcd3: {host: "127.0.0.1:2379"}
bootstrap:
  dcs:
    ttl: 20
    loop_wait: 2
    retry_timeout: 3
    synchronous_mode: true
    postgresql: {use_pg_rewind: true, parameters: {max_connections: 200, wal_log_hints: "on"}}
postgresql:
  listen: "$1:$patroni_port"
  connect_address: "$1:$patroni_port"
  data_dir: "$base/data"
  bin_dir: "$bin"
  pgpass: "$base/pgpass"
  authentication: {superuser: {username: postgres}, replication: {username: postgres}}
  pg_hba: ["host all all 127.0.0.0/8 trust", "host replication all 127.0.0.0/8 trust"]
  parameters: {unix_socket_directories: ""}
YAML
    start_as_server_user patroni "$scratch/patroni-$1.yml" >>"$scratch/patroni-$1.log" 2>&1
    patroni_pids[$1]=$!
}

# answers HOST PATH: Patroni there answers with 200.
answers() { curl --silent --fail --max-time 2 --output "$scratch/answer" "http://$1:8008/$2"; }

# leader_host: prints the host of the primary.
leader_host() {
    local host
    for host in "${patroni_hosts[@]}"; do
        if answers "$host" primary; then
            echo "$host"
            return
        fi
    done
    return 1
}

other_host() { if [[ $1 == "${patroni_hosts[0]}" ]]; then echo "${patroni_hosts[1]}"; else echo "${patroni_hosts[0]}"; fi; }

# fail_over PLACE EVENT: the host of the primary dies, and comes back later.
fail_over() {
    local old
    old=$(leader_host)
    eventually 60 "the standby is synchronous before $2" answers "$(other_host "$old")" synchronous
    essential
    kill_node "$old"
    recovers "$1" "$2"
    start_node "$old"
    eventually 60 "the old primary is a standby after $2" answers "$old" replica
    essential
}

# switch_over PLACE EVENT: Patroni exchanges the roles.
switch_over() {
    local old new
    old=$(leader_host)
    new=$(other_host "$old")
    eventually 60 "the standby is synchronous before $2" answers "$new" synchronous
    essential
    ok "Patroni switches over" curl --silent --show-error --fail --max-time 60 --output "$scratch/answer" \
        --header 'Content-Type: application/json' --data "{\"leader\": \"$old\", \"candidate\": \"$new\"}" \
        "http://$old:8008/switchover"
    recovers "$1" "$2"
}

start_haproxy() {
    cat >"$scratch/haproxy.cfg" <<CFG
defaults
    mode tcp
    timeout connect 2s
    timeout client 30m
    timeout server 30m
    timeout check 1s
listen primary
    bind 127.0.0.1:$haproxy_port
    option httpchk GET /primary
    http-check expect status 200
    default-server inter 1s fall 2 rise 1 on-marked-down shutdown-sessions
    server one ${patroni_hosts[0]}:$patroni_port check port 8008
    server two ${patroni_hosts[1]}:$patroni_port check port 8008
CFG
    start_as_server_user haproxy -db -f "$scratch/haproxy.cfg" >>"$scratch/haproxy.log" 2>&1
    haproxy=$!
}

# A name with the addresses of both servers, for this script and its programs alone.
name_both_servers() {
    cp /etc/hosts "$scratch/hosts"
    printf '%s bmdb.example\n' "${patroni_hosts[@]}" >>"$scratch/hosts"
    echo 'multi on' >"$scratch/host.conf"
    mount --bind "$scratch/hosts" /etc/hosts
    mount --bind "$scratch/host.conf" /etc/host.conf
    is "$(getent ahosts bmdb.example | grep -c STREAM)" 2
}

fail_patroni() {
    # Patroni takes over the data that the other parts left.
    as_server_user "$bin/pg_ctl" -D "$scratch/server-$primary/data" -m fast stop >/dev/null
    as_server_user mkdir -m 700 "$scratch/server-${patroni_hosts[0]}" "$scratch/server-${patroni_hosts[0]}/data"
    as_server_user cp -a "$scratch/server-$primary/data/." "$scratch/server-${patroni_hosts[0]}/data"
    as_server_user rm -f "$scratch/server-${patroni_hosts[0]}/data/postgresql.auto.conf"
    as_server_user touch "$scratch/server-${patroni_hosts[0]}/data/postgresql.auto.conf"

    as_server_user mkdir -m 700 "$scratch/etcd"
    start_as_server_user etcd --data-dir "$scratch/etcd" --listen-client-urls http://127.0.0.1:2379 \
        --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 >>"$scratch/etcd.log" 2>&1
    etcd=$!
    start_node "${patroni_hosts[0]}"
    eventually 120 "Patroni has a primary" leader_host
    essential
    start_node "${patroni_hosts[1]}"
    eventually 120 "Patroni has a synchronous standby" answers "${patroni_hosts[1]}" synchronous
    essential
    primary=$patroni_list

    start_haproxy
    start_shepherd "$haproxy_port"
    recovers "$haproxy_port" "a start behind HAProxy"
    fail_over "$haproxy_port" "a fail-over behind HAProxy"
    switch_over "$haproxy_port" "a switch-over behind HAProxy"
    stop_shepherd

    ok "a list of Patroni's servers is accepted" checked "$patroni_list"
    start_shepherd "$patroni_list"
    recovers "$patroni_list" "a start without HAProxy"
    fail_over "$patroni_list" "a fail-over without HAProxy"
    switch_over "$patroni_list" "a switch-over without HAProxy"
    stop_shepherd

    ok "a name has the addresses of both servers" name_both_servers
    essential
    start_shepherd "bmdb.example:$patroni_port"
    recovers "bmdb.example:$patroni_port" "a start by a name with two addresses"
    switch_over "bmdb.example:$patroni_port" "a switch-over by a name with two addresses"
    fail_over "bmdb.example:$patroni_port" "a fail-over by a name with two addresses"
    stop_shepherd
}
