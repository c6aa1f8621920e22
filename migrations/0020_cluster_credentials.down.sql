DROP TABLE cluster_credential;
