DROP TABLE provider_state;
DROP TABLE sealed_secret;
DROP TABLE fleet_listening;
DROP TABLE bmdb_identity;
DROP TABLE policy;
DROP TABLE named_lease;
DROP TABLE session;
