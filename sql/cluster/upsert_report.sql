-- Record what an agent reports about its node. `reported_at` is when it first reported this.
INSERT INTO machine_cluster_report AS r
    (machine_id, generation, node_key, ca_certificate, address, error, epoch, next_authority, next_authority_step,
     etcd_version, etcdutl_version, secrets, reported_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, clock_timestamp())
ON CONFLICT (machine_id) DO UPDATE
SET generation = EXCLUDED.generation, node_key = EXCLUDED.node_key, ca_certificate = EXCLUDED.ca_certificate,
    address = EXCLUDED.address, error = EXCLUDED.error, epoch = EXCLUDED.epoch,
    next_authority = EXCLUDED.next_authority, next_authority_step = EXCLUDED.next_authority_step,
    etcd_version = EXCLUDED.etcd_version, etcdutl_version = EXCLUDED.etcdutl_version, secrets = EXCLUDED.secrets,
    reported_at = EXCLUDED.reported_at
WHERE (r.generation, r.node_key, r.ca_certificate, r.address, r.error, r.epoch, r.next_authority, r.next_authority_step,
       r.etcd_version, r.etcdutl_version, r.secrets)
    IS DISTINCT FROM (EXCLUDED.generation, EXCLUDED.node_key, EXCLUDED.ca_certificate, EXCLUDED.address, EXCLUDED.error,
                      EXCLUDED.epoch, EXCLUDED.next_authority, EXCLUDED.next_authority_step,
                      EXCLUDED.etcd_version, EXCLUDED.etcdutl_version, EXCLUDED.secrets)
