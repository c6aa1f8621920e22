# shellcheck shell=sh
# Becomes the program "$@", with a watcher beside it: $1 is the watcher's script. Nothing happens
# between the two that the death of our starter could fall into, because the watcher is there
# before the program is. Standard input is that one's hold on us, and not the program's.
watcher=$1
shift
exec 3<&0 </dev/null
# Without our environment and output: nobody who looks for the program, or reads what it says to the
# end, shall find the watcher.
env -i /bin/sh -c "$watcher" test-watcher "$$" <&3 3<&- >/dev/null 2>&1 &
exec 3<&-
exec "$@"
