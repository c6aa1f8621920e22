ALTER TABLE cluster DROP COLUMN restoring_with_image;
ALTER TABLE machine_cluster_report DROP COLUMN etcdutl_version;
ALTER TABLE machine_cluster_report DROP COLUMN etcd_version;
DROP TABLE cluster_image_part;
DROP TABLE cluster_image;
