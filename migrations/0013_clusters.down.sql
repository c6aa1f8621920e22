DROP TABLE cluster_order;
DROP TABLE machine_cluster_report;
DROP TABLE machine_cluster;
DROP TABLE cluster;
