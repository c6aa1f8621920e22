# shellcheck shell=bash
# Builds with a progress count, for scripts that run in the root of the checkout.

# build_counted WHAT CARGO-ARGUMENT…: runs `cargo build` and prints how many of the packages are built: on a terminal in
# one line that is updated, elsewhere in a line every 40 packages. Compiler errors are printed unchanged.
build_counted() {
    local what=$1 total began=$SECONDS step=1
    shift
    local -a selection=()
    # The arguments that select packages.
    while IFS= read -r argument; do selection+=("$argument"); done < <(
        printf '%s\n' "$@" | awk '/^(--no-default-features|--all-features)$/ { print } /^--features$/ { print; getline; print }'
    )
    total=$(cargo tree --locked --edges normal,build --prefix none --format '{p}' "${selection[@]}" | sed 's/ (\*)$//' | sort -u | wc -l)
    [[ -t 1 ]] || step=40
    cargo build --locked --quiet --message-format json-render-diagnostics "$@" </dev/null |
        awk -v what="$what" -v total="$total" -v step="$step" -v terminal="$([[ -t 1 ]] && echo 1 || echo 0)" '
            match($0, /"reason":"compiler-artifact","package_id":"[^"]*"/) {
                id = substr($0, RSTART + 46, RLENGTH - 47)
                if (seen[id]++) next
                done++
                name = id
                sub(/^.*[\/#]/, "", name)
                if (terminal) printf "\r\033[K  %s: %d of %d packages, last %s", what, done, total, name
                else if (done % step == 0) printf "  %s: %d of %d packages\n", what, done, total
                fflush()
            }
            END { if (terminal) printf "\r\033[K" }
        '
    echo "  $what: built in $((SECONDS - began)) s"
}
