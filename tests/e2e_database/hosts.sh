# shellcheck shell=bash disable=SC2154
# The part `hosts` of tests/e2e_database/run: a URL with several hosts, and a name with several addresses, through
# switch-overs and a server that swallows packets.
#
# Sourced by that script, which has the functions and variables.

# is_streaming PORT: the standby of the server of that port has everything.
is_streaming() {
    is "$(sql "$1" "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND replay_lsn >= sent_lsn")" 1
}

# exchange_roles OLD NEW: stops the primary OLD, promotes its standby NEW, and lets OLD come back as a standby of it.
exchange_roles() {
    eventually 30 "the standby is streaming" is_streaming "$1"
    as_server_user "$bin/pg_ctl" -D "$scratch/server-$1/data" -m fast stop >/dev/null
    sql "$2" 'SELECT pg_promote()' >/dev/null
    primary=$2
}

fail_hosts() {
    local list=127.0.0.1:6001,127.0.0.1:6002 old=$primary new
    new=$((6001 + 6002 - old))
    as_server_user "$bin/pg_ctl" -D "$scratch/server-$new/data" -m immediate stop >/dev/null 2>&1 || true
    clone_server "$old" "$new"
    ok "a URL for a standby is refused by name" refused_with "target_session_attrs=standby leads to a server that takes no" \
        checked "postgres://postgres@$list/bmdb?target_session_attrs=standby"
    ok "a list without a server that takes writes is refused with each host and its reason" refused_with \
        "none of its hosts can be used: 127.0.0.1:$new: the server is read-only; 127.0.0.1:6009: " \
        checked "127.0.0.1:$new,127.0.0.1:6009"
    ok "a list is accepted wherever its primary is" checked "$list"
    start_shepherd "$list"
    recovers "$list" "a start with a list of hosts"
    exchange_roles "$old" "$new"
    recovers "$list" "a switch-over with a list of hosts"
    clone_server "$new" "$old"
    exchange_roles "$new" "$old"
    recovers "$list" "a switch-over back with a list of hosts"

    # The forwarder is in front of the old server. It swallows what is sent on old and new connections.
    stop_shepherd
    clone_server "$old" "$new"
    lead_to "$old"
    list=127.0.0.1:6000,127.0.0.1:$new
    start_shepherd "$list"
    recovers "$list" "a start with the forwarder in the list"
    eventually 30 "the standby is streaming" is_streaming "$old"
    lead_to 0
    as_server_user "$bin/pg_ctl" -D "$scratch/server-$old/data" -m immediate stop >/dev/null
    sql "$new" 'SELECT pg_promote()' >/dev/null
    primary=$new
    recovers "$list" "a host of the list that fell silent"
    lead_to "$new"
}
