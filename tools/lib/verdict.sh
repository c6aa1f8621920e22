# shellcheck shell=bash
# The output of the end-to-end tests: one line for each checked statement, with the second in which it became true.
#
# Sourced by scripts that run in the root of the checkout and have their own directory, $scratch.

# Number of lines printed so far, by verdict.
# shellcheck disable=SC2034 # the sourcing script prints them
passed=0 failed=0

verdict() {
    local word="not ok"
    if [[ $1 -eq 0 ]]; then word=ok; fi
    printf '%-6s %4ds  %s\n' "$word" "$SECONDS" "$2"
}

# Runs a command as a separate script would: its first failure ends it. In an `if` or a `||` it would continue after a
# failure, and a check of several conditions would only depend on the last.
code=0
attempt() {
    set +e
    (
        set -e
        "$@"
    ) >"${scratch:?}/last" 2>&1
    code=$?
    set -e
}

tell() {
    verdict "$code" "$1"
    if [[ $code -eq 0 ]]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        tail -n 20 "$scratch/last" | sed 's/^/#   /'
    fi
}

# ok SENTENCE COMMAND…: the sentence is true if the command succeeds.
ok() {
    local sentence=$1
    shift
    attempt "$@"
    tell "$sentence"
}

# Seconds between two attempts. A script on a host that emulates machines sets more: the attempts take processors from them.
poll_interval=0.2

# eventually SECONDS SENTENCE COMMAND…: the same, but the command may take this long to succeed.
eventually() {
    local end=$((SECONDS + $1)) sentence=$2
    shift 2
    attempt "$@"
    while [[ $code -ne 0 && $SECONDS -lt $end ]]; do
        sleep "$poll_interval"
        attempt "$@"
    done
    tell "$sentence"
}

# Nothing that follows can be true without the last statement.
essential() {
    if [[ $code -ne 0 ]]; then
        echo "# the rest depends on this"
        exit 1
    fi
}

is() { [[ "$1" == "$2" ]] || { printf 'expected %s\nfound    %s\n' "$2" "$1"; return 1; }; }

# refused WORDS COMMAND…: the command fails, and its output contains these words.
refused() {
    local words=$1 answer
    shift
    if answer=$("$@"); then
        printf 'it succeeded, and printed %s\n' "$answer"
        return 1
    fi
    [[ $answer == *"$words"* ]] || { printf 'expected %s\nfound    %s\n' "$words" "$answer"; return 1; }
}
