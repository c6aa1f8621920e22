# shellcheck shell=sh
# Kills our parent, process $1, when standard input ends: when the process that holds its other end has
# closed it or died, in whatever way. A parent that has ended before is nobody's number to kill any more,
# and the kernel has given us another by then.
trap '' HUP INT TERM
while read -r _; do :; done
while read -r name value; do
  if [ "$name" = PPid: ] && [ "$value" = "$1" ]; then
    kill -9 "$1"
  fi
done </proc/self/status
