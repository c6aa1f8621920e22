# Runs a PostgreSQL server and outlives the client that started it: $1 is the signal that ends the server
# when the client is gone, $2 what to remove afterwards (or nothing), the rest the server's command.
#
# Standard input is the client's hold on us. Each line is a signal for the server; the end of input
# means that the client has stopped or died, in whatever way, because the kernel closes pipes even
# for those killed outright. Standard output is a lock file, held for as long as the server lives.
at_end=$1
remove=$2
shift 2
exec 3<&0 </dev/null
"$@" 3<&- 4>&1 >&2 &
server=$!
(
  while read -r signal; do
    kill -s "$signal" "$server" 2>/dev/null
  done <&3
  # Short sleeps, so that no orphan sleeps on when the server has ended and this subshell is killed.
  for signal in "$at_end" QUIT KILL; do
    kill -s "$signal" "$server" 2>/dev/null
    tenths=0
    while [ "$tenths" -lt 300 ]; do
      sleep 0.1
      tenths=$((tenths + 1))
    done
  done
) &
reader=$!
wait "$server"
code=$?
kill "$reader" 2>/dev/null
if [ -n "$remove" ]; then
  rm -rf -- "$remove"
fi
exit "$code"
