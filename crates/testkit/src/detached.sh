# shellcheck shell=sh
# Kills every process that was given the argument $DIRECTORY when standard input ends. Several times,
# because one that is about to be killed may just have started another.
trap '' HUP INT TERM
while read -r _; do :; done
for _ in 1 2 3 4 5; do
  for line in /proc/[0-9]*/cmdline; do
    if tr '\0' '\n' <"$line" 2>/dev/null | grep -Fqx -e "$DIRECTORY"; then
      process=${line%/cmdline}
      kill -9 "${process#/proc/}" 2>/dev/null
    fi
  done
done
