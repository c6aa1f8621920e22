# shellcheck shell=bash
# Taking the debug information out of a program, into a file that a debugger finds.

# split_debug PROGRAM DESTINATION: puts the program into the folder DESTINATION without symbols, and beside it
# PROGRAM.debug with all of them. The program names that file and its checksum, and debuggers look for it beside the
# program and below /usr/lib/debug. Each is renamed into place: the program may run. (Files that cargo itself splits off
# would be useless after this: what they are found by is in the sections that go.)
split_debug() {
    local program name destination=$2
    program=$(realpath "$1") name=$(basename "$1")
    mkdir -p "$destination"
    objcopy --only-keep-debug "$program" "$destination/$name.debug"
    chmod 644 "$destination/$name.debug"
    (
        # The link holds the file's name as it is given, which must be without a folder.
        cd "$destination" || exit
        objcopy --strip-all --add-gnu-debuglink="$name.debug" "$program" ".$name.new"
        mv -T ".$name.new" "$name"
    )
}
