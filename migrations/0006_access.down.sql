DROP TABLE audit;
DROP TABLE access_credential;
