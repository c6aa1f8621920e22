# Removes the directory $1 when standard input ends: the process that holds its other end has stopped
# or died. A process that is about to end may still write there, so it is tried for a while.
while read -r _; do :; done
tries=0
while [ -e "$1" ] && [ "$tries" -lt 100 ]; do
  rm -rf -- "$1" && break
  sleep 0.1
  tries=$((tries + 1))
done
