DROP TABLE approval;
