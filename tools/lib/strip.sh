# shellcheck shell=bash
# Moves the debug information of a program into a file that a debugger finds.

# split_debug PROGRAM DESTINATION: installs the program without symbols in the folder DESTINATION, and beside it
# PROGRAM.debug with all symbols. The program contains the name and checksum of that file, and debuggers look for it beside
# the program and below /usr/lib/debug. The program is renamed into place, because the old one may be running. (Debug files
# that cargo itself splits off would be useless after this: the references to them are in the sections that are removed.)
split_debug() {
    local program name destination=$2
    program=$(realpath "$1") name=$(basename "$1")
    mkdir -p "$destination"
    objcopy --only-keep-debug "$program" "$destination/$name.debug"
    chmod 644 "$destination/$name.debug"
    (
        # The link stores the file name exactly as given, and it must have no folder.
        cd "$destination" || exit
        objcopy --strip-all --add-gnu-debuglink="$name.debug" "$program" ".$name.new"
        mv -T ".$name.new" "$name"
    )
}
