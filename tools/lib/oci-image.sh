# shellcheck shell=bash
# Builds container images without a registry or a daemon: one layer, in the layout of the Open Container Initiative, which
# `ctr images import` reads. The same files give the same bytes.
#
#     oci_image OUT.tar REFERENCE ENTRYPOINT PATH=FILE…
#
# PATH is the path of FILE in the image, without the leading slash. Programs must be static, because the image contains
# nothing else. Needs jq.

# Writes the files below a directory to standard output as a tar archive without owners and times, ordered by name.
plain_tar() {
    local directory=$1
    shift
    tar --create --format=ustar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=u+rw,go-w \
        --directory "$directory" "$@"
}

sha256_of() { sha256sum "$1" | cut -d ' ' -f 1; }

oci_image() {
    local out=$1 reference=$2 entrypoint=$3 work digest pair
    shift 3
    work=$(mktemp -d)
    mkdir -p "$work/root" "$work/image/blobs/sha256"
    for pair in "$@"; do
        install -D -m 755 "${pair#*=}" "$work/root/${pair%%=*}"
    done
    plain_tar "$work/root" . >"$work/layer"
    local layer layer_size config config_size manifest manifest_size architecture
    case $(uname -m) in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(uname -m) ;;
    esac
    keep() {
        digest=$(sha256_of "$1")
        mv "$1" "$work/image/blobs/sha256/$digest"
        stat -c %s "$work/image/blobs/sha256/$digest"
    }
    layer=$(sha256_of "$work/layer")
    layer_size=$(keep "$work/layer")
    jq -cn --arg layer "sha256:$layer" --arg entrypoint "$entrypoint" --arg architecture "$architecture" \
        '{architecture: $architecture, os: "linux", created: "1970-01-01T00:00:00Z", config: {Entrypoint: [$entrypoint], WorkingDir: "/"},
          rootfs: {type: "layers", diff_ids: [$layer]}}' >"$work/config"
    config=$(sha256_of "$work/config")
    config_size=$(keep "$work/config")
    jq -cn --arg config "sha256:$config" --argjson config_size "$config_size" --arg layer "sha256:$layer" --argjson layer_size "$layer_size" \
        '{schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json",
          config: {mediaType: "application/vnd.oci.image.config.v1+json", digest: $config, size: $config_size},
          layers: [{mediaType: "application/vnd.oci.image.layer.v1.tar", digest: $layer, size: $layer_size}]}' >"$work/manifest"
    manifest=$(sha256_of "$work/manifest")
    manifest_size=$(keep "$work/manifest")
    jq -cn --arg manifest "sha256:$manifest" --argjson size "$manifest_size" --arg reference "$reference" \
        '{schemaVersion: 2, manifests: [{mediaType: "application/vnd.oci.image.manifest.v1+json", digest: $manifest, size: $size,
          annotations: {"io.containerd.image.name": $reference, "org.opencontainers.image.ref.name": ($reference | sub("^.*:"; ""))}}]}' \
        >"$work/image/index.json"
    printf '{"imageLayoutVersion":"1.0.0"}' >"$work/image/oci-layout"
    plain_tar "$work/image" . >"$out"
    rm -rf "$work"
}
