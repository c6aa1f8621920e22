# shellcheck shell=bash
# A private PostgreSQL for the tools, listening on a UNIX socket in a 0700 directory only.
#
# The programs have their own implementation in crates/bmdb/src/connection/private_postgres. These few lines exist
# because that code cannot be compiled before a database has checked its statements.
#
# Sourced by scripts that run in the root of the checkout.

# Prints the directory of the server programs.
postgres_bin() {
    local directory
    local -a places=()
    if [[ -n ${SHEPHERD_POSTGRES_BIN:-} ]]; then
        places=("$SHEPHERD_POSTGRES_BIN")
    else
        mapfile -t places < <(printf '%s\n' /usr/lib/postgresql/*/bin /usr/pgsql-*/bin | sort -rV)
        if command -v initdb >/dev/null; then
            # In PATH may be a link to it, without the other programs.
            places=("$(dirname "$(readlink -f "$(command -v initdb)")")" "${places[@]}")
        fi
        if command -v pg_config >/dev/null; then
            places+=("$(pg_config --bindir)")
        fi
    fi
    for directory in "${places[@]}"; do
        if [[ -x $directory/initdb && -x $directory/pg_ctl && -x $directory/postgres ]]; then
            printf '%s\n' "$directory"
            # Not a bare return: in a trap that would return the status with which the script ended.
            return 0
        fi
    done
    echo "no PostgreSQL server programs were found (looked in ${places[*]});" \
        "install them with 'apt-get install postgresql', or name their directory in SHEPHERD_POSTGRES_BIN" >&2
    return 1
}

# Runs a command as a user that may run a server: the current user, or for root another user.
as_server_user() {
    if [[ $(id -u) -ne 0 ]]; then
        "$@"
        return
    fi
    (become_server_user "$@")
}
become_server_user() {
    local user=postgres
    id -u "$user" >/dev/null 2>&1 || user=nobody
    # In a directory that this user can enter.
    cd / && exec setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups -- "$@"
}

# start_as_server_user PROGRAM ARGUMENT…: the same in the background. $! is the program, not a shell that waits for it.
start_as_server_user() {
    if [[ $(id -u) -ne 0 ]]; then
        "$@" &
        return
    fi
    (become_server_user "$@") &
}

# Prints the parent directory of temporary servers: in memory if there is plenty, otherwise on disk. Each test gets a copy of
# a database and drops it, and disk file systems are slow at making hundreds of files soon after others were removed.
postgres_parent() {
    local shared=/dev/shm plenty=$((8 * 1024 * 1024))
    if [[ $(stat --file-system --format=%T "$shared" 2>/dev/null) == tmpfs &&
        $(df --output=avail -k "$shared" | tail -n 1) -ge $plenty &&
        $(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo) -ge $plenty ]]; then
        printf '%s\n' "$shared"
    else
        printf '/tmp\n'
    fi
}

# Creates a temporary server and prints its directory.
postgres_create() {
    local bin directory
    bin=$(postgres_bin)
    directory=$(as_server_user mktemp -d "$(postgres_parent)/shepherd-tools.XXXXXXXX")
    as_server_user "$bin/initdb" --no-sync --auth=trust --locale=C --encoding=UTF8 --username=postgres \
        --pgdata="$directory/data" >"$directory/initdb.log"
    printf '%s\n' "$directory"
}

# Starts the server of a directory, unless it already runs.
postgres_start() {
    local bin directory=$1
    bin=$(postgres_bin)
    as_server_user "$bin/pg_ctl" -D "$directory/data" status >/dev/null && return
    as_server_user "$bin/pg_ctl" -D "$directory/data" -l "$directory/server.log" -w -t 120 -s \
        -o "-k $directory -c listen_addresses= -c unix_socket_permissions=0700 -c port=5432 -c fsync=off \
            -c shepherd.throw_away=on" \
        start </dev/null >/dev/null
}

# Starts the server of a directory. When this script ends, however it ends, the server ends and the directory is removed:
#
#     postgres_hold DIRECTORY SETTING=VALUE…
#
# A child that must not keep the server alive after the script closes the descriptor in the variable postgres_hold.
postgres_hold() {
    local bin directory=$1 setting end=$((SECONDS + 120))
    local -a settings=()
    bin=$(postgres_bin)
    # Without the second one, what the first one may lose would be an issue.
    for setting in fsync=off shepherd.throw_away=on "${@:2}"; do
        settings+=(-c "$setting")
    done
    # shellcheck disable=SC2034 # sourcing scripts close it
    exec {postgres_hold}> >(
        # In its own session, because Ctrl-C reaches a whole process group and the server must be the last to stop.
        as_server_user setsid sh -c "$(cat crates/bmdb/src/connection/private_postgres/guardian.sh)" guardian QUIT "$directory" \
            "$bin/postgres" -D "$directory/data" -k "$directory" -c listen_addresses= -c unix_socket_permissions=0700 \
            -c port=5432 -c jit=off -c timezone=UTC "${settings[@]}" >"$directory/server.log" 2>&1
    )
    until psql -X -q -c 'SELECT 1' "$(postgres_url "$directory" postgres)" >/dev/null 2>&1; do
        if [[ $SECONDS -ge $end ]]; then
            cat "$directory/server.log" >&2
            echo "the PostgreSQL server in $directory does not accept connections" >&2
            return 1
        fi
        sleep 0.05
    done
}

# Stops the server of a directory and removes it.
postgres_remove() {
    local bin directory=$1
    if [[ -d $directory/data ]]; then
        bin=$(postgres_bin)
        as_server_user "$bin/pg_ctl" -D "$directory/data" -m immediate -w -s stop >/dev/null 2>&1 || true
    fi
    rm -rf -- "$directory"
}

# Prints the address of a database: postgres_url DIRECTORY DATABASE
postgres_url() {
    printf 'postgres:///%s?host=%s&port=5432&user=postgres&sslmode=disable\n' "$2" "$1"
}

# Creates a database with the schema of migrations/: postgres_migrate DIRECTORY DATABASE
postgres_migrate() {
    local migration
    psql -X -q -v ON_ERROR_STOP=1 -c "CREATE DATABASE $2" "$(postgres_url "$1" postgres)"
    for migration in migrations/*.up.sql; do
        if [[ -e $migration ]]; then
            psql -X -q -1 -v ON_ERROR_STOP=1 -f "$migration" "$(postgres_url "$1" "$2")" >/dev/null
        fi
    done
}
