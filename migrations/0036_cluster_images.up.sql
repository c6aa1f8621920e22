-- Images of the whole etcd of a cluster, each of one snapshot. An image is cut into parts, and each part is sealed and
-- written for itself. The image counts once `completed_at` is set: its size, its digest and the number of its parts are
-- written then. It is abandoned when another one is begun for the cluster before that. The parts of an image go in small
-- batches after its snapshot has gone, so no key refers to the snapshot.
CREATE TABLE cluster_image (
    image_id     UUID PRIMARY KEY,
    cluster_id   UUID NOT NULL,
    snapshot_id  UUID NOT NULL,
    begun_at     TIMESTAMPTZ NOT NULL,
    abandoned    BOOL NOT NULL DEFAULT FALSE,
    completed_at TIMESTAMPTZ,
    parts        INT8,
    bytes        INT8,
    digest       BYTEA CHECK (length(digest) = 32),
    revision     INT8,
    etcd_version TEXT
);
CREATE INDEX cluster_image_by_cluster ON cluster_image (cluster_id);
CREATE UNIQUE INDEX cluster_image_by_snapshot ON cluster_image (snapshot_id) WHERE completed_at IS NOT NULL;

CREATE TABLE cluster_image_part (
    image_id UUID NOT NULL REFERENCES cluster_image (image_id),
    number   INT8 NOT NULL,
    sealed   BYTEA NOT NULL,
    PRIMARY KEY (image_id, number)
);

-- The versions of etcd and etcdutl on the machine. NULL: there is none, or the role server is of an earlier release.
ALTER TABLE machine_cluster_report ADD COLUMN etcd_version TEXT;
ALTER TABLE machine_cluster_report ADD COLUMN etcdutl_version TEXT;

-- Whether a cluster that is being restored gets the image of etcd of its snapshot, too.
ALTER TABLE cluster ADD COLUMN restoring_with_image BOOL NOT NULL DEFAULT FALSE;
