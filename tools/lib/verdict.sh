# shellcheck shell=bash
# What the end-to-end tests say: a line for each thing that they hold to be true, with the second it came true in.
#
# Sourced, by scripts that run in the root of the checkout and have a directory of their own, $scratch.

# Lines printed so far, by what they said.
# shellcheck disable=SC2034 # printed by whoever sources this
passed=0 failed=0

verdict() {
    local word="not ok"
    if [[ $1 -eq 0 ]]; then word=ok; fi
    printf '%-6s %4ds  %s\n' "$word" "$SECONDS" "$2"
}

# Runs a command as a script of its own would: its first failure ends it. In an `if` or a `||` it would go on after
# one, and a check of several things would hold only the last.
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

# ok SENTENCE COMMAND…: holds the sentence to be true when the command succeeds.
ok() {
    local sentence=$1
    shift
    attempt "$@"
    tell "$sentence"
}

# eventually SECONDS SENTENCE COMMAND…: the same, but it may take this long to come true.
eventually() {
    local end=$((SECONDS + $1)) sentence=$2
    shift 2
    attempt "$@"
    while [[ $code -ne 0 && $SECONDS -lt $end ]]; do
        sleep 0.2
        attempt "$@"
    done
    tell "$sentence"
}

is() { [[ "$1" == "$2" ]] || { printf 'expected %s\nfound    %s\n' "$2" "$1"; return 1; }; }

# refused WORDS COMMAND…: the command fails, and says so in these words.
refused() {
    local words=$1 answer
    shift
    if answer=$("$@"); then return 1; fi
    [[ $answer == *"$words"* ]] || { printf 'expected %s\nfound    %s\n' "$words" "$answer"; return 1; }
}
